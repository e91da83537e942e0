from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from trencadis.cli.generate_command import prompts_of
from trencadis.errors import InvalidRequestError


@pytest.fixture
def passage(tmp_path: Path) -> str:
    path = tmp_path / "long.txt"
    path.write_bytes("Of Man’s first disobedience,\r\nand the fruit\n".encode())
    return str(path)


def test_arguments_are_prompts_and_a_dash_stands_for_the_lines_of_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n\n  Bye\r\n"))
    assert prompts_of(["One", "-"], None) == ["One", "Hello", "  Bye"]


def test_a_file_stands_behind_the_prompt_and_a_line_break_as_it_is(passage: str) -> None:
    text = "Of Man’s first disobedience,\r\nand the fruit\n"
    assert prompts_of(["Repeat the passage:"], passage) == [f"Repeat the passage:\n{text}"]
    assert prompts_of([], passage) == [text]


@pytest.mark.parametrize("given", [["a", "b"], ["-"]])
def test_a_file_goes_with_one_prompt_at_most(passage: str, given: list[str]) -> None:
    with pytest.raises(InvalidRequestError, match=r"goes with one prompt or none, and there are: ") as caught:
        prompts_of(given, passage)
    assert caught.value.exit_code == 2


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"--file '.*nope.txt' cannot be read: No such file"):
        prompts_of([], str(tmp_path / "nope.txt"))


def test_a_file_that_is_no_text_says_where(tmp_path: Path) -> None:
    (tmp_path / "bin").write_bytes(b"abc\xff")
    with pytest.raises(InvalidRequestError, match="no text in UTF-8: byte 3 is 0xff"):
        prompts_of([], str(tmp_path / "bin"))


def test_nothing_at_all_is_no_prompt(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    for given, file in (([], None), ([""], None), ([], str(tmp_path / "empty"))):
        with pytest.raises(InvalidRequestError, match="there is no prompt"):
            prompts_of(given, file)
