"""Every Python block in README and docs runs; every shell command of the README is run by a test."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    pytest.param(match.group(1), id=f"{page.relative_to(ROOT)}:{page.read_text()[: match.start()].count(chr(10)) + 1}")
    for page in PAGES
    for match in re.finditer(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
]


@pytest.mark.parametrize("block", BLOCKS)
def test_python_block_runs(block: str, tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(block)
    result = subprocess.run(
        [sys.executable, "-W", "error::SyntaxWarning", str(script)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr[-3000:]
