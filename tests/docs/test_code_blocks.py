"""Every Python block in README and docs runs; every shell command of the README is run by a test."""

from __future__ import annotations

import re
import shlex
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


README_COMMANDS = [
    line.split("#")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    for line in block.splitlines()
    if line.startswith("trencadis ")
]


@pytest.mark.parametrize("command", README_COMMANDS)
def test_command_of_the_readme_works(command: str, tmp_path: Path) -> None:
    words = shlex.split(command)
    result = subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, check=False, cwd=tmp_path, timeout=120
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert len(result.stdout.strip()) > 40


def test_readme_has_the_set_up_and_test_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert "pip install -e .\n" in text
    assert 'pip install -e ".[dev]" && pytest' in text
    assert len(README_COMMANDS) >= 4


def test_config_of_the_readme_loads(tmp_path: Path) -> None:
    from trencadis.registry.startup import load_with_plugins

    (block,) = re.findall(r"```toml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    path = tmp_path / "serve.toml"
    path.write_text(block)
    resolved, _ = load_with_plugins(file=path, environ={})
    assert resolved.config.bucketing.name == "exponential"
    assert resolved.config.backend.components["torch"].layout == "padded"
