"""The pages of the documentation that are made from code, whole or in part, each by a function that returns Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from docs_pages.answers import answers_page
from docs_pages.commands import commands_page
from docs_pages.configuration import CONFIGURATION_PAGES
from docs_pages.errors import errors_page
from docs_pages.hooks import hooks_page
from docs_pages.http_api import http_api_page
from docs_pages.layouts import layouts_page
from docs_pages.metrics import metrics_page
from docs_pages.other_engines import with_flags
from docs_pages.python_api import python_page
from docs_pages.records import with_records

__all__ = ["PAGES"]

_DOCS = Path(__file__).resolve().parents[2] / "docs"

PAGES: Mapping[str, Callable[[], str]] = {
    **CONFIGURATION_PAGES,
    "errors.md": errors_page,
    "http-api.md": http_api_page,
    "hooks.md": hooks_page,
    "metrics.md": metrics_page,
    "commands.md": commands_page,
    "answers.md": answers_page,
    "layouts.md": layouts_page,
    "python.md": python_page,
    "do/from-vllm.md": partial(with_flags, _DOCS / "do/from-vllm.md"),
    **{
        f"{page.parent.name}/{page.name}": partial(with_records, page)
        for page in sorted([*(_DOCS / "plugins").glob("*.md"), *(_DOCS / "do").glob("*.md")])
        if "<!-- records of " in page.read_text(encoding="utf-8")
    },
}
"""Path under ``docs/`` of each page, and what makes it."""
