from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_imports_between_rooms_point_one_way() -> None:
    tool = Path(sys.executable).with_name("lint-imports")
    command = str(tool) if tool.exists() else shutil.which("lint-imports")
    if command is None:
        pytest.skip("import-linter is not installed: pip install -e '.[dev]'")
    result = subprocess.run([command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_import_contracts_have_no_exceptions() -> None:
    assert "ignore_imports" not in (ROOT / "pyproject.toml").read_text()
