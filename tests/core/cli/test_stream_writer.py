from __future__ import annotations

import io
import os

import pytest

from trencadis.cli.stream_writer import StreamWriter


class Screen(io.StringIO):
    """A terminal in memory."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def twenty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.get_terminal_size", lambda *_: os.terminal_size((20, 24)))


def written(*pieces: str, to: type[io.StringIO] = Screen) -> str:
    stream = to()
    writer = StreamWriter(stream)
    for piece in pieces:
        writer.write(piece)
    writer.end()
    return stream.getvalue()


TEXT = "The old man looked at the sea, and it was as it had been.\n\nThen he went.  Home"


@pytest.mark.parametrize("size", [1, 3, 100])
def test_lines_break_between_words_however_the_text_comes(size: int) -> None:
    lines = written(*(TEXT[i : i + size] for i in range(0, len(TEXT), size))).split("\n")
    lines = [line.rstrip() for line in lines]
    assert lines[:2] == ["The old man looked", "at the sea, and it"]
    assert all(len(line) < 20 for line in lines)
    assert " ".join(" ".join(lines).split()) == " ".join(TEXT.split())
    assert "" in lines[:-1]  # the empty line of the text


def test_a_word_longer_than_a_line_is_broken() -> None:
    assert [len(line) for line in written("x" * 45).split()] == [19, 19, 7]


def test_wide_characters_take_two_columns() -> None:
    assert [len(line) for line in written("海" * 20).split()] == [9, 9, 2]


def test_what_would_move_the_cursor_is_not_written() -> None:
    assert written("a\x1b[2Jb\rc\x07") == "a\N{REPLACEMENT CHARACTER}[2Jb c\N{REPLACEMENT CHARACTER}\n"


def test_elsewhere_than_on_a_terminal_text_is_written_as_it_is() -> None:
    assert written(TEXT, "\x1b\r", to=io.StringIO) == f"{TEXT}\x1b\r\n"


def test_nothing_is_written_for_no_text_on_a_terminal() -> None:
    assert (written(), written(to=io.StringIO)) == ("", "\n")
