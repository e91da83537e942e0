"""A decision record is one page: context, decision, consequences."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "decisions"
SOURCES = {
    path.name
    for room in ("core", "plugins", "backends", "benchmarks", "tests", "tools", "docs")
    for path in (ROOT / room).rglob("*.*")
}
RECORDS = sorted(path for path in FOLDER.glob("0*.md") if not path.name.startswith("0000"))
PAGE = 4600
"""Characters on a printed page: 58 lines of 80."""


def test_a_record_is_a_page_with_its_three_sections() -> None:
    for record in RECORDS:
        text = record.read_text(encoding="utf-8")
        headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
        assert headings[:2] == ["Context", "Decision"], record
        assert "Consequences" in headings, record
        assert len(re.sub(r"\]\([^)]*\)", "]", text)) <= PAGE, f"{record}: shorten it"


def test_files_modules_and_names_that_a_record_names_exist() -> None:
    for record in [*RECORDS, FOLDER / "in-short.md"]:
        text = record.read_text(encoding="utf-8")
        named = re.findall(r"`(?:[\w.-]+/)*(\w+\.(?:py|cpp|h|toml|txt))`", text)
        assert [name for name in named if name not in SOURCES | {"pyproject.toml"}] == [], record
        for name in re.findall(r"`(trencadis\w*(?:\.\w+)+)", text):
            if not name.endswith((".toml", ".service", ".lock")):
                pkgutil.resolve_name(name)


def test_a_decision_is_told_once() -> None:
    told = re.findall(r"^### (\d{4}) ", (FOLDER / "in-short.md").read_text(encoding="utf-8"), re.MULTILINE)
    numbers = [*told, *(record.name[:4] for record in RECORDS)]
    assert len(told) > 50
    assert sorted(numbers) == sorted(set(numbers))
