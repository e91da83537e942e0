"""The page "Your first plugin" from top to bottom, with real installations: what the page's other test leaves out."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.block_runner import CLIENT, BlockRunner
from support.doc_blocks import ROOT, STAND_INS, Block, blocks_of

BLOCKS = blocks_of(ROOT / "docs/plugins/index.md")
PROJECT = "trencadis-scheduling-lottery"


class Reader:
    """Somebody who follows the page in a folder of their own; commands of ``trencadis`` run in forks."""

    def __init__(self, folder: Path, forks: BlockRunner) -> None:
        self.project = folder / PROJECT
        self._folder = folder
        self._installed = folder / "installed"
        self._environment = {
            **os.environ,
            "PYTHONPATH": f"{self._installed}{os.pathsep}{ROOT / 'tests'}",
            "OMP_NUM_THREADS": "1",
            "TRENCADIS_SERVER__PORT": "0",
            "CLIENT": CLIENT,
            "FORKS_AT": forks.address,
        }

    def run(self, line: str, cwd: Path | None = None, **variables: str) -> str:
        """Run one command of the page, with more variables in its environment."""
        command, _, rest = line.partition(" ")
        words = line
        if command == "trencadis":
            words = STAND_INS[command].replace('"$@"', rest)
        elif command in ("pytest", "hatchling"):
            words = f"{sys.executable} -m {line}"
        result = subprocess.run(
            ["bash", "-euc", words],
            cwd=cwd or self._folder,
            env={**self._environment, **variables},
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        assert result.returncode == 0, f"{line}\n{result.stdout[-2000:]}\n{result.stderr[-2000:]}"
        return result.stdout

    def install(self) -> None:
        """Build the wheel and unpack it: what pip does with pure Python, without an index."""
        shutil.rmtree(self._installed, ignore_errors=True)
        self.run(f"hatchling build -t wheel -d {self._installed}", cwd=self.project)
        (wheel,) = self._installed.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(self._installed)
        wheel.unlink()

    def save(self, block: Block) -> None:
        """Write a block that names its file where the page says it belongs."""
        base = self.project if block.file.startswith("tests/") else self.project / "src"
        (base / block.file).write_text(block.text)


def lines(language: str, word: str) -> Iterator[str]:
    for block in BLOCKS:
        if block.language == language:
            yield from (line for line in block.text.splitlines() if line.startswith(word))


@pytest.mark.slow
def test_a_reader_ends_with_a_plugin_that_works(tmp_path: Path, python_blocks: BlockRunner) -> None:
    pytest.importorskip("hatchling", reason="hatchling is not installed: pip install -e '.[dev]'")
    reader = Reader(tmp_path, python_blocks)
    reader.run(next(lines("sh", "trencadis new-plugin")))
    reader.install()  # that its tests pass as they are is tested where the package is made
    plugins, generate, doctor = lines("text", "trencadis ")
    assert "lottery" in reader.run(plugins)
    assert len(reader.run(generate)) > 20
    assert "lottery, active" in reader.run(doctor)

    files = [block for block in BLOCKS if block.file]
    assert len(files) == 3
    for block in files:
        reader.save(block)
    reader.run(next(lines("sh", "sed ")))
    reader.install()
    reader.run("pytest -q -p no:cacheprovider -p support.strategies.few_histories", cwd=reader.project)
    conform = list(lines("sh", "pytest --trencadis-conform"))
    assert len(conform) == 3
    for line in conform:
        # What takes longest by far this policy went through a line above: random histories, and two processes of its own.
        slow = "any_history or hashes_differently"
        reader.run(f"{line} -q -p no:cacheprovider", cwd=reader.project, PYTEST_ADDOPTS=f"-k 'not ({slow})'")


def test_every_noun_of_the_page_has_its_suite() -> None:
    import trencadis_testing
    from trencadis.hookspecs import NOUNS

    text = (ROOT / "docs/plugins/index.md").read_text(encoding="utf-8")
    rows = {
        cells[1].split("]")[0].strip("[ "): cells[3].replace("`", "").split(",")
        for line in text.splitlines()
        if line.startswith("| [") and len(cells := line.split("|")) == 5
    }
    assert list(rows) == list(NOUNS)
    assert all(suite.strip() in trencadis_testing.__all__ for suites in rows.values() for suite in suites)
