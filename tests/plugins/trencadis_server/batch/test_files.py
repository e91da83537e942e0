from __future__ import annotations

import os
from pathlib import Path

import pytest

from trencadis.errors import ConfigError
from trencadis_server.batch.files import Done, OutputFile, count_lines, input_lines, read_output
from trencadis_server.batch.lines import BadLineError, OutputLine

OK = OutputLine.answered("batch_req_1", "a", status=200, request_id="r", body=b"{}")
BAD = OutputLine.refused("batch_req_2", BadLineError("invalid_line", "line 2: no"))
AGAIN = OutputLine.refused("batch_req_3", BadLineError("duplicate_custom_id", "line 3: again", "b"))


@pytest.fixture
def output(tmp_path):
    file = tmp_path / "out.jsonl"
    with OutputFile(file) as opened:
        for line in (OK, BAD, AGAIN):
            opened.write(line)
    return file


def test_empty_lines_of_the_input_are_left_out_but_numbered(tmp_path):
    file = tmp_path / "in.jsonl"
    file.write_bytes(b"\xef\xbb\xbfone\n\n  \nfour\r\nfive")  # and the mark of byte order
    assert [(number, text.strip()) for number, text in input_lines(file)] == [(1, b"one"), (4, b"four"), (5, b"five")]
    assert count_lines(file) == 3


def test_what_is_in_the_output_is_done(output):
    done = read_output(output)
    assert done.ids == {"batch_req_1", "batch_req_2", "batch_req_3"}
    assert done.custom_ids == {"a"}  # the line that repeats "b" is no answer to "b"
    assert done.num_bytes == output.stat().st_size


@pytest.mark.parametrize("torn", [b"{", b'{"id": "batch_req_9", "custom_id": "z"}'])
def test_a_torn_last_line_is_cut_off(output, torn):
    whole = output.read_bytes()
    output.write_bytes(whole + torn)
    done = read_output(output)
    assert "batch_req_9" not in done.ids
    with OutputFile(output, num_bytes=done.num_bytes) as opened:
        opened.write(OK)
    assert output.read_bytes() == whole + whole.splitlines(keepends=True)[0]


@pytest.mark.parametrize("line", [b"not json\n", b"[]\n", b'{"id": "x"}\n', b'{"custom_id": "x"}\n'])
def test_a_file_of_something_else_is_left_alone(tmp_path, line):
    file = tmp_path / "precious.txt"
    file.write_bytes(line)
    with pytest.raises(ConfigError, match="line 1 was not written by run-batch"):
        read_output(file)
    assert file.read_bytes() == line


def test_each_line_is_in_the_file_before_the_next_is_written(tmp_path):
    file = tmp_path / "out.jsonl"
    with OutputFile(file) as opened:
        opened.write(OK)
        assert file.read_bytes().count(b"\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_full_disk_is_said_in_words_and_closing_is_still_possible(tmp_path):
    with OutputFile(tmp_path / "out.jsonl") as opened:
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, opened._file.fileno())
        os.close(full)
        with pytest.raises(ConfigError, match=r"No space left on device.*it goes on from here"):
            opened.write(OK)


def test_what_cannot_be_read_or_written_is_said_in_words(tmp_path):
    pipe, none = tmp_path / "pipe", tmp_path / "none.jsonl"
    os.mkfifo(pipe)
    for call, file, words in (
        (count_lines, none, "No such file"),
        (count_lines, tmp_path, "Is a directory"),
        (count_lines, pipe, "no regular file.*cannot be a pipe"),  # it is read twice
        (read_output, Path("/dev/full"), "no regular file"),  # reading it may never end
        (OutputFile, tmp_path / "no" / "out.jsonl", "cannot be written"),
    ):
        with pytest.raises(ConfigError, match=words):
            call(file)
    assert read_output(none) == Done()
