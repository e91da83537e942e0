"""Tables of what flags and commands of other engines are called here, from ``core/trencadis/other_engines.toml``.

On a page that is otherwise written by hand each lies between two comments::

    <!-- flags of vllm: Scheduling; made by tools/write_docs.py from other_engines.toml -->
    <!-- end of flags -->
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from docs_pages.configuration import built_in_settings
from docs_pages.markdown import table
from trencadis.config.messages import show
from trencadis.other_engines import ENGINES, Counterpart, commands, sections

__all__ = ["flags_of", "other_commands", "with_flags"]

_DOCS = Path(__file__).resolve().parents[2] / "docs"
_PART = re.compile(r"(<!-- flags of (\w+): ([^;]+);[^>]*-->\n).*?(<!-- end of flags -->)", re.DOTALL)
_LINK = re.compile(r"\]\((?!https?:|#)([^)]+)\)")
_NONE = "—"


def with_flags(page: Path) -> str:
    """Return the text of a page whose tables of flags are made anew; the rest stays. Reads the page.

    Raises:
        ValueError: The page has no place for any, or names a section that does not exist.
    """
    folder = page.parent.relative_to(_DOCS).as_posix()

    def part(found: re.Match[str]) -> str:
        begin, engine, title, end = found.groups()
        if title not in {section.title for section in sections()}:
            raise ValueError(f"{page}: other_engines.toml has no section {title!r}")
        return f"{begin}{flags_of(engine, title, folder=folder)}{end}"

    text, count = _PART.subn(part, page.read_text(encoding="utf-8"))
    if not count:
        raise ValueError(f"{page} has no comment '<!-- flags of ENGINE: SECTION; ... -->' with its end after it")
    return text


def flags_of(engine: str, title: str, *, folder: str) -> str:
    """Return the table of the flags of one engine in one section.

    Args:
        engine: Its key in the table.
        title: Of the section.
        folder: Of the page, below ``docs/``, for links.
    """
    rows = [row for section in sections() if section.title == title for row in section.rows if engine in row.flags]
    cells = [(_codes(row.flags[engine]), ", ".join(_ours(row)) or _NONE, _note(row, folder)) for row in rows]
    return table((ENGINES[engine], "Trencadís", "note"), cells)


def other_commands() -> str:
    """Return the table of commands of other engines that are answered."""
    rows = {command.theirs: command for command in commands().values()}
    cells = [(f"`{name}`", f"`{one.ours}`" if one.ours else _NONE, one.note) for name, one in rows.items()]
    return table(("command", "Trencadís", "note"), cells)


def _codes(flags: tuple[str, ...]) -> str:
    return ", ".join(f"`{flag}`" for flag in flags)


def _ours(row: Counterpart) -> Iterator[str]:
    if row.flag:
        yield f"`{row.flag}`"
    for path in row.settings:
        setting = built_in_settings().get(path)
        assert setting is not None, f"other_engines.toml: {path} is no setting"
        value = row.value if setting.type is bool else show(row.value)
        yield f"`{path} = {value}`" if row.value else f"`{path}`"


def _note(row: Counterpart, folder: str) -> str:
    def relative(found: re.Match[str]) -> str:
        return f"]({posixpath.relpath(found.group(1), folder)})"

    return "; ".join(filter(None, (row.note, _LINK.sub(relative, row.more))))
