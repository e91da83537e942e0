"""Parts of pages that are otherwise written by hand: the fields of the records that a plugin is given, from their docstrings.

Such a part lies between two comments; the first names the module and the classes::

    <!-- records of trencadis.interfaces: SamplingContext Sampled; made by tools/write_docs.py, change the code -->
    <!-- end of records -->
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import attrs

from docs_pages.markdown import code_spans
from docs_pages.python_api import told

__all__ = ["with_records"]

_PART = re.compile(r"(<!-- records of ([\w.]+): ([\w ]+);[^>]*-->\n).*?(<!-- end of records -->)", re.DOTALL)


def with_records(page: Path) -> str:
    """Return the text of a page whose tables of records are made anew; the rest stays. Reads the page.

    Raises:
        ValueError: The page has no place for any.
    """
    text, count = _PART.subn(_part, page.read_text(encoding="utf-8"))
    if not count:
        raise ValueError(f"{page} has no comment '<!-- records of MODULE: CLASS CLASS; ... -->' with its end after it")
    return text


def _part(found: re.Match[str]) -> str:
    begin, module, names, end = found.groups()
    home = importlib.import_module(module)
    return "\n".join([begin, *(_section(getattr(home, name)) for name in names.split()), end])


def _section(record: type[Any]) -> str:
    properties = [
        (name, value) for name, value in vars(record).items() if isinstance(value, property) and value.__doc__
    ]
    said = [f"`{name}`: {code_spans(value.__doc__)}" for name, value in properties]
    base = record.__mro__[1]
    if attrs.has(base) and attrs.fields(base):
        said.append(f"It has the fields of `{base.__name__}`, too.")
    return "\n\n".join([f"### `{record.__name__}`", *told(record), *said]) + "\n"
