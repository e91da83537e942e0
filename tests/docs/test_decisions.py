"""A decision record is one page: context, decision, consequences."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "decisions"
SOURCES = {
    path.name
    for room in ("core", "plugins", "backends", "benchmarks", "tests", "tools", "docs")
    for path in (ROOT / room).rglob("*.*")
}
RECORDS = sorted(path for path in FOLDER.glob("0*.md") if not path.name.startswith("0000"))
PAGES = [*RECORDS, FOLDER / "in-short.md"]
PAGE = 4600
"""Characters on a printed page: 58 lines of 80."""


@pytest.mark.representatives(1000)
@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.stem)
def test_a_record_is_a_page_with_its_three_sections(record: Path) -> None:
    text = record.read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert headings[:2] == ["Context", "Decision"]
    assert "Consequences" in headings
    printed = re.sub(r"\]\([^)]*\)", "]", text)
    assert len(printed) <= PAGE, f"{len(printed)} characters; shorten it"


@pytest.mark.representatives(1000)
@pytest.mark.parametrize("record", PAGES, ids=lambda record: record.stem)
def test_files_that_a_record_names_exist(record: Path) -> None:
    named = re.findall(r"`(?:[\w.-]+/)*(\w+\.(?:py|cpp|h|toml|txt))`", record.read_text(encoding="utf-8"))
    assert [name for name in named if name not in SOURCES | {"pyproject.toml"}] == []


@pytest.mark.representatives(1000)
@pytest.mark.parametrize("record", PAGES, ids=lambda record: record.stem)
def test_modules_and_names_that_a_record_names_exist(record: Path) -> None:
    for name in re.findall(r"`(trencadis\w*(?:\.\w+)+)", record.read_text(encoding="utf-8")):
        if not name.endswith((".toml", ".service", ".lock")):
            pkgutil.resolve_name(name)


def test_a_decision_is_told_once() -> None:
    told = re.findall(r"^### (\d{4}) ", (FOLDER / "in-short.md").read_text(encoding="utf-8"), re.MULTILINE)
    numbers = [*told, *(record.name[:4] for record in RECORDS)]
    assert len(told) > 50
    assert sorted(numbers) == sorted(set(numbers))
