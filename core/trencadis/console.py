"""What commands print: tables on standard output, and the progress of long work.

Progress is a line on a terminal that goes away, whatever the log's level; elsewhere lines in the log, now and then and at the end.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, TextIO

from trencadis.clock import Clock, SystemClock
from trencadis.log import say
from trencadis.screen import TextWriter, dimmed, progress_line, stream_text, write_line

__all__ = [
    "Advance",
    "TextWriter",
    "dimmed",
    "on_terminal",
    "print_table",
    "print_text",
    "say",
    "stream_text",
    "track",
    "write_line",
]

if TYPE_CHECKING:
    from rich.console import Console

logger = logging.getLogger("trencadis")

_LINE_S = 30.0
"""Between two lines of the log."""
_GUESS_AFTER_S = 1.0
"""Before that, what is left would jump."""
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"

_GAP = 2
"""Spaces between two columns of a table."""

_LAST_COLUMN = 24
"""Least width of a table's last column on a terminal."""


class Advance(Protocol):
    """Says how much is done by now, in all, and how much there is, if that is known by now."""

    def __call__(self, done: int, total: int | None = None) -> None:
        """Note it."""
        ...


def on_terminal() -> bool:
    """Return whether standard error is a terminal, where progress is drawn. Pure."""
    return sys.stderr.isatty()


@contextlib.contextmanager
def track(
    what: str,
    *,
    total: int | None = None,
    unit: str = "",
    show: bool | None = None,
    part: Callable[[], str] = str,
    clock: Clock | None = None,
) -> Iterator[Advance]:
    """Show the progress of a ``with`` block.

    Args:
        what: Work in progress, such as ``"Loading demo"``.
        total: How much there is to do; None if unknown.
        unit: Unit of ``total``, such as ``prompts``.
        show: Draw a line of progress, which goes away at the end; None: on a terminal only.
        part: Returns the part of the work that runs now, such as ``"weights"``; called on another thread.
        clock: The system's if none.

    Yields:
        A function that takes how much is done by now.
    """
    if on_terminal() if show is None else show:
        progress = _Progress(what, total=total, unit=unit, part=part, clock=clock or SystemClock())
        with progress_line(progress.line):
            yield progress.advance
        return
    clock = clock or SystemClock()
    start_s = said_s = clock.now_s()
    num_done, num_all = 0, total

    def note(done: int, total: int | None = None) -> None:
        nonlocal num_done, num_all, said_s
        num_done, num_all, now_s = done, num_all if total is None else total, clock.now_s()
        if done and now_s - said_s >= _LINE_S:
            said_s = now_s
            of = "" if num_all is None else f" of {num_all}"
            logger.info("%s: %d%s %s after %.0f s", what, done, of, unit, now_s - start_s)

    yield note
    amount = f"{num_done} {unit} " if num_done and unit else ""
    logger.info("%s: %sin %.1f s", what, amount, clock.now_s() - start_s)


class _Progress:
    """How far some work is, as a line for a terminal: what, which part, how many of how many, and about how much time is left."""

    def __init__(self, what: str, *, total: int | None, unit: str, part: Callable[[], str], clock: Clock) -> None:
        self._what = what
        self._unit = unit
        self._part = part
        self._clock = clock
        self._start_s = clock.now_s()
        self._first: tuple[int, float] | None = None
        self._done, self._total = 0, total

    def advance(self, done: int, total: int | None = None) -> None:
        """Note it."""
        if self._first is None and done:
            self._first = done, self._clock.now_s()
        self._done, self._total = done, self._total if total is None else total

    def line(self, columns: int) -> str:
        """Return the line; what is done is shortened where there is no room. Pure."""
        now_s = self._clock.now_s()
        parts = [" ".join(filter(None, (self._part(), self._amount())))]
        parts += [_duration(now_s - self._start_s), self._left(now_s)]
        rest = " · ".join(filter(None, parts))
        room = max(columns - len(rest) - 4, 8)
        what = self._what if len(self._what) <= room else f"{self._what[: room - 1]}…"
        return f"{_SPINNER[int(now_s * len(_SPINNER)) % len(_SPINNER)]} {what}: {rest}"

    def _amount(self) -> str:
        if self._total is not None:
            return f"{self._done}/{self._total} {self._unit}"
        return f"{self._done} {self._unit}" if self._done else ""

    def _left(self, now_s: float) -> str:
        """Return about how long it will take, by the time that it took since the first was done; empty if that is not known."""
        if self._first is None or self._total is None or self._done >= self._total:
            return ""
        done, since_s = self._done - self._first[0], now_s - self._first[1]
        if done <= 0 or since_s < _GUESS_AFTER_S:
            return ""
        return f"about {_duration(since_s / done * (self._total - self._done))} left"


def _duration(seconds: float) -> str:
    """Return a duration in words: ``42 s``, ``3 min 20 s``. Pure."""
    whole = round(seconds)
    return f"{whole} s" if whole < 100 else f"{whole // 60} min {whole % 60} s"


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, stream: TextIO | None = None) -> None:
    """Print a table: on a terminal as wide as it is, elsewhere plain aligned text, so that it can be searched and cut.

    On a terminal the last column is wrapped, and no other one is: a name is never cut. Where the others leave no room for it, each
    row becomes a paragraph, its first cell in a line of its own.

    Args:
        headings: One per column.
        rows: Cells, one per column.
        stream: Where to; none: standard output.
    """
    out = sys.stdout if stream is None else stream
    if not out.isatty():
        widths = [max(len(row[column]) for row in [headings, *rows]) for column in range(len(headings))]
        for row in [headings, *rows]:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip(), file=out)
        return
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=out, highlight=False)
    widths = [max(cell_len(row[column]) for row in [headings, *rows]) for column in range(len(headings))]
    left = console.width - sum(width + _GAP for width in widths[:-1])
    if left < min(widths[-1], _LAST_COLUMN):
        _print_paragraphs(console, headings, rows)
        return
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, _GAP, 0, 0))
    for heading in headings[:-1]:
        table.add_column(heading, no_wrap=True)
    table.add_column(headings[-1], overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def _print_paragraphs(console: Console, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print each row as its first cell, and below it, indented, the other ones that are not empty, with their headings."""
    from rich.padding import Padding
    from rich.text import Text

    for row in rows:
        console.print(Text(row[0], style="bold", overflow="fold"))
        for heading, cell in zip(headings[1:], row[1:], strict=True):
            if cell:
                text = f"{heading}: {cell}" if heading else cell
                console.print(Padding(Text(text, overflow="fold"), (0, 0, 0, 2)))


def print_text(text: str, *, indent: str = "", stream: TextIO | None = None) -> None:
    """Print one paragraph: on a terminal wrapped between words, elsewhere as one line.

    Args:
        text: Without line breaks.
        indent: Before each line but the first.
        stream: Where to; none: standard output.
    """
    out = sys.stdout if stream is None else stream
    if not out.isatty():
        print(text, file=out)
        return
    for line in textwrap.wrap(
        text, shutil.get_terminal_size().columns, subsequent_indent=indent, break_on_hyphens=False
    ):
        print(line, file=out)
