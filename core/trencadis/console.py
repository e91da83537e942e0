"""What commands print: tables on standard output, and the progress of long work.

Progress is a bar on a terminal, whatever the log's level; elsewhere lines in the log, now and then and at the end.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, TextIO

from trencadis.clock import Clock, SystemClock

__all__ = ["Advance", "on_terminal", "print_table", "print_text", "track"]

if TYPE_CHECKING:
    from rich.console import Console

logger = logging.getLogger("trencadis")

_LINE_S = 30.0
"""Between two lines of the log."""

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
    """Return whether standard error is a terminal, where bars are drawn. Pure."""
    return sys.stderr.isatty()


@contextlib.contextmanager
def track(
    what: str, *, total: int | None = None, unit: str = "", show: bool | None = None, clock: Clock | None = None
) -> Iterator[Advance]:
    """Show the progress of a ``with`` block.

    Args:
        what: What is being done, such as ``"Loading demo"``.
        total: How much there is to do; None if unknown.
        unit: Of ``total``, such as ``prompts``.
        show: Draw a bar; None: on a terminal only.
        clock: For lines of the log; the system's if none.

    Yields:
        A function that takes how much is done by now.
    """
    if on_terminal() if show is None else show:
        with _bar(what, total=total, unit=unit) as advance:
            yield advance
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


@contextlib.contextmanager
def _bar(what: str, *, total: int | None, unit: str) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[amount]}"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total, amount="")
        known_total = total

        def advance(done: int, total: int | None = None) -> None:
            of = total if total is not None else known_total
            amount = f"{done}/{of} {unit}" if of is not None else f"{done} {unit}" if done else ""
            progress.update(task, completed=done, total=of, amount=amount)

        yield advance


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
