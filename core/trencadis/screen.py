"""One writer for a terminal: a line of progress, streamed text and lines of the log never land within one another.

    log of this process ─┐
    standard error of ───┴▶ write_line ─▶ above the line of progress | after the streamed text | as it is
    processes it starts

Where standard error is no terminal, lines are written as they come, and processes inherit it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
import threading
import unicodedata
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, TextIO

if TYPE_CHECKING:
    from rich.live import Live

__all__ = ["TextWriter", "child_stderr", "dimmed", "drain_children", "progress_line", "stream_text", "write_line"]

_FRAMES_PER_S: Final = 8
_PIECE_BYTES: Final = 1 << 16
_MAX_LINE_BYTES: Final = 1 << 20
_MARK: Final = b"\x00drained\x00"
"""What this process writes to the pipe of its children to learn that everything before was read."""
_DRAIN_S: Final = 2.0
_TAB: Final = 8


class _Screen:
    """Who writes to the terminal now."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.bars: list[Callable[[int], str]] = []
        """The line of each progress that is shown; the last is drawn."""
        self.live: Live | None = None
        self.num_texts = 0
        self.held: list[tuple[str, TextIO]] = []
        """Lines that wait for the end of a text."""


_screen = _Screen()


def write_line(line: str, *, stream: TextIO | None = None) -> None:
    """Write a line to standard error: above a line of progress, after a text that is being streamed. From any thread.

    Args:
        line: Without the line break at its end; may have some within it.
        stream: Where to; None: standard error.
    """
    out = sys.stderr if stream is None else stream
    with _screen.lock:
        if not _is_terminal(out):
            _write(line, out)
        elif _screen.num_texts:
            _screen.held.append((line, out))
        elif _screen.live is not None:
            from rich.text import Text

            _screen.live.console.print(Text.from_ansi(_folded(line, out)), soft_wrap=True)
        else:
            _write(_folded(line, out), out)


def _folded(text: str, out: TextIO) -> str:
    """Return lines without words that are cut at the edge of a terminal; what goes on in the next line is indented."""
    columns = _columns(out)
    return "\n".join(
        line if len(line) <= columns or "\x1b" in line else _folded_line(line, columns) for line in text.split("\n")
    )


def _folded_line(line: str, columns: int) -> str:
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.fill(line, columns, subsequent_indent=f"{indent}  ", break_long_words=False, break_on_hyphens=False)


def _write(line: str, out: TextIO) -> None:
    out.write(f"{line}\n")
    out.flush()


@contextlib.contextmanager
def progress_line(render: Callable[[int], str]) -> Iterator[None]:
    """Draw a line at the bottom of the terminal during a ``with`` block, and take it away at the end.

    Of several, the one that began last is drawn.

    Args:
        render: Returns the line for a number of columns; called several times a second on a thread of its own.
    """
    with _screen.lock:
        _screen.bars.append(render)
        if _screen.live is None and not _screen.num_texts:
            _screen.live = _started_live()
    try:
        yield
    finally:
        with _screen.lock:
            if _screen.live is not None:
                _screen.live.refresh()
            _screen.bars.remove(render)
            if _screen.live is not None and not _screen.bars:
                _screen.live.stop()
                _screen.live = None


def _started_live() -> Live:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(stderr=True)

    def line() -> Text:
        bars, width = _screen.bars[-1:], console.width
        return Text(bars[0](width - 1) if bars else "", no_wrap=True, overflow="ellipsis", end="")

    live = Live(
        console=console,
        get_renderable=line,
        refresh_per_second=_FRAMES_PER_S,
        transient=True,
        redirect_stdout=_is_terminal(sys.stdout),
    )
    live.start()
    # A process that is killed leaves the terminal as it found it.
    console.show_cursor(True)
    return live


# -------------------------------------------------------------------------------------------------- streamed text


@contextlib.contextmanager
def stream_text(stream: TextIO | None = None) -> Iterator[TextWriter]:
    """Return what writes a text piece by piece; lines of the log wait until the block ends, and the last line is ended.

    Args:
        stream: Where to; None: standard output. The text is written as it is where that is no terminal.
    """
    writer = TextWriter(sys.stdout if stream is None else stream)
    with _screen.lock:
        _screen.num_texts += 1
    try:
        yield writer
    finally:
        writer.end_line()
        with _screen.lock:
            _screen.num_texts -= 1
            if not _screen.num_texts:
                held, _screen.held = _screen.held, []
                for line, out in held:
                    write_line(line, stream=out)


class TextWriter:
    """Writes a text piece by piece. On a terminal words are not cut at the edge, and control characters are not obeyed.

    Args:
        out: Where to.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._obeys = _is_terminal(out) and os.environ.get("TERM") != "dumb"
        self._column = 0
        self._word = ""

    def write(self, piece: str, *, dim: bool = False) -> None:
        """Write what comes next, at once.

        Args:
            piece: Part of the output, of any length.
            dim: Less bright, on a terminal.
        """
        if not piece:
            return
        if self._obeys:
            shown = "".join(map(self._placed, piece.replace("\r\n", "\n")))
            self._out.write(dimmed(shown, self._out) if dim else shown)
        else:
            self._out.write(piece)
            self._column = 0 if piece.endswith("\n") else 1
        self._out.flush()

    def end_line(self) -> None:
        """Begin a line, unless nothing is written in this one yet."""
        if self._column:
            self.write("\n")

    def _placed(self, char: str) -> str:
        """Return what writes one character: with the word that it belongs to moved to the next line, if there is no room."""
        if char == "\n":
            self._column, self._word = 0, ""
            return char
        if char == "\t":
            return "".join(map(self._placed, " " * (_TAB - self._column % _TAB)))
        from rich.cells import cell_len

        if unicodedata.category(char) == "Cc":
            char = "\N{REPLACEMENT CHARACTER}"
        # The last column stays free: with a character there, terminals disagree on where the cursor is.
        columns, width, before = _columns(self._out) - 1, cell_len(char), ""
        if self._column + width > columns:
            if char == " ":
                self._column, self._word = 0, ""
                return "\n"
            moved = cell_len(self._word)
            before = f"\x1b[{moved}D\x1b[K\n{self._word}" if 0 < moved < self._column else "\n"
            self._word = self._word if 0 < moved < self._column else ""
            self._column = cell_len(self._word)
        self._column += width
        self._word = "" if char == " " else self._word + char
        return before + char


def dimmed(text: str, stream: TextIO | None = None) -> str:
    """Return a text that is less bright if it is written to a terminal; ``NO_COLOR`` is honoured.

    Args:
        text: Text to be written.
        stream: Where to; None: standard error.
    """
    out = sys.stderr if stream is None else stream
    plain = not _is_terminal(out) or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if plain else f"\x1b[2m{text}\x1b[0m"


def _is_terminal(out: TextIO) -> bool:
    return bool(out is not None and not getattr(out, "closed", False) and out.isatty())


def _columns(out: TextIO) -> int:
    try:
        return max(os.get_terminal_size(out.fileno()).columns or 80, 8)
    except (OSError, ValueError):
        return 80


# ------------------------------------------------------------------------------------------- processes we started


class _ChildLines:
    """Reads what processes write to their standard error, and writes it line by line. One pipe for all of them."""

    def __init__(self) -> None:
        source, self.file = os.pipe()
        self._drained = threading.Event()
        threading.Thread(target=self._read, args=(source,), name="trencadis-children", daemon=True).start()

    def drain(self) -> None:
        """Wait until what was written so far is shown."""
        self._drained.clear()
        os.write(self.file, _MARK + b"\n")
        self._drained.wait(_DRAIN_S)

    def _read(self, source: int) -> None:
        rest = b""
        while piece := os.read(source, _PIECE_BYTES):
            *lines, rest = (rest + piece).split(b"\n")
            if len(rest) > _MAX_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                # Of a bar that a library draws there, the last state.
                text = line.removesuffix(_MARK).rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace")
                if text:
                    write_line(text)
                if line.endswith(_MARK):
                    self._drained.set()


_children: _ChildLines | None = None
_children_lock = threading.Lock()


def child_stderr() -> int | None:
    """Return what a process that is started gets as standard error: on a terminal a pipe whose lines are written by this one.

    None: what this process has; a started process then outlives the end of this one without losing a word.
    """
    global _children  # noqa: PLW0603 - one for all
    with _children_lock:
        try:
            draws = sys.stderr is not None and os.isatty(2)
        except OSError:
            draws = False
        if not draws:
            return None
        if _children is None:
            _children = _ChildLines()
        return _children.file


def drain_children() -> None:
    """Wait until what processes wrote before they ended is shown."""
    if _children is not None:
        _children.drain()
