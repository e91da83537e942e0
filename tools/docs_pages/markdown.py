"""Small helpers for pages made from docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["code_spans", "heading_note", "paragraphs", "table"]


def heading_note(source: str) -> str:
    """Return the comment, for who edits the file, that says what a page is made from. Pure."""
    return f"<!-- Made by tools/write_docs.py from {source}; change the code, not the page. -->"


def paragraphs(documented: Any) -> list[str]:
    """Return the docstring's paragraphs, without surrounding blank lines; empty if there is none. Pure."""
    return [part.strip("\n") for part in re.split(r"\n\s*\n", inspect.getdoc(documented) or "") if part.strip()]


def code_spans(text: str) -> str:
    """Return a docstring's text as Markdown on one line: code in single backticks, roles as plain code. Pure."""
    text = re.sub(r":\w+:`~?\.?([^`]+)`", r"`\1`", text)
    return " ".join(re.sub(r"``(.+?)``", r"`\1`", text, flags=re.DOTALL).split())


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, with its last line break. Pure."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"
