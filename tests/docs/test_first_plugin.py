"""The page "Your first plugin" as a reader types it, in an environment made by README's first command, which has no extra."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.doc_blocks import ROOT, blocks_of, is_walked
from support.fresh_venv import FreshVenv

PAGE = ROOT / "docs/plugins/index.md"
OF_EXTRAS = {
    *("hatchling", "llguidance", "matplotlib", "mypy", "openai", "pytest-xdist", "redis", "ruff", "scipy", "zstandard"),
}
"""Distributions that other extras than `test` bring: a reader of the page does not have them."""


class Reader:
    """Types what the page shows, in a folder of their own, and stays in the folder into which a command went.

    Attributes:
        wrote: What each command line wrote.
    """

    def __init__(self, folder: Path, venv: FreshVenv) -> None:
        self.wrote: dict[str, str] = {}
        self._venv = venv
        self._folder = folder

    def type(self, line: str) -> None:
        after = self._venv.folder / "folder"
        self.wrote[line] = self._venv.run(f"{line}\npwd > {after}", cwd=self._folder)
        self._folder = Path(after.read_text().strip())

    def answers(self, beginning: str) -> list[str]:
        """Return what the command lines wrote that begin so."""
        return [text for line, text in self.wrote.items() if line.startswith(beginning)]

    def save(self, file: str, text: str) -> None:
        path = self._folder / file
        assert path.parent.is_dir(), f"{file} lies in no folder of {self._folder}"
        path.write_text(text, encoding="utf-8")


@pytest.mark.nightly  # its names: test_names_on_pages.py; a new package in such an environment: trencadis_tools/new_plugin
def test_a_reader_who_types_the_page_ends_with_a_plugin_that_works(tmp_path: Path) -> None:
    venv = FreshVenv.make(tmp_path / "venv", extras=("test",))
    assert not venv.installed() & {*OF_EXTRAS, "hypothesis", "pytest"}

    (tmp_path / "mine").mkdir()
    reader = Reader(tmp_path / "mine", venv)
    for block in blocks_of(PAGE):
        if block.file and block.file.startswith(("src/", "tests/")):
            reader.save(block.file, block.text)
        elif is_walked(block):
            for line in block.text.splitlines():
                reader.type(line)

    (listed,) = reader.answers("trencadis plugins ")
    assert "lottery" in listed
    (text,) = reader.answers("trencadis generate ")
    assert len(text) > 20
    (report,) = reader.answers("trencadis doctor ")
    assert " 0 wrong" in report
    assert len(reader.answers("pytest --trencadis-conform ")) == 3
    assert 'declares = frozenset({"arrival_order"})' in reader.wrote["pytest"]
    assert "run them with --trencadis-all-histories" in reader.wrote["pytest"]
    (wheel,) = (tmp_path / "mine/trencadis-scheduling-lottery/dist").glob("*.whl")
    assert wheel.name.startswith("trencadis_scheduling_lottery-")
    assert not venv.installed() & OF_EXTRAS, "the page needs more than it says"


def test_every_noun_of_the_page_has_its_suite() -> None:
    import trencadis_kv.testing
    import trencadis_testing
    from support.nouns import ALL_NOUNS

    text = (ROOT / "docs/plugins/index.md").read_text(encoding="utf-8")
    rows = {
        cells[1].split("]")[0].strip("[ "): cells[3].replace("`", "").split(",")
        for line in text.splitlines()
        if line.startswith("| [") and len(cells := line.split("|")) == 5
    }
    assert set(rows) == set(ALL_NOUNS)
    assert all(
        suite.strip() in (*trencadis_testing.__all__, *trencadis_kv.testing.__all__)
        for suites in rows.values()
        for suite in suites
    )
