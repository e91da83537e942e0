"""Tables on standard output."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TextIO

__all__ = ["print_table"]


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, stream: TextIO | None = None) -> None:
    """Print a table: drawn on a terminal, plain aligned text elsewhere, so that it can be searched and cut.

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
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*headings, box=None, header_style="bold", pad_edge=False)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console(file=out).print(table)
