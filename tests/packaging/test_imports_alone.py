"""Each module can be the first that is imported: nothing comes in a circle, or is used because somebody else has imported it.

Static circles are looked for by ``tools/house.py --circles``. What that does not see is ``import a.b``, and imports by a call.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FORKS = """
import os, sys
for name in sys.argv[1].split():
    __import__(name)
for name in sys.argv[2:]:
    if not (child := os.fork()):
        try:
            __import__(name)
        except BaseException as error:
            print(name, repr(error), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
"""Imports each module in a process that has imported others' alone, and prints a line for each that fails."""
OTHERS = "attrs cattrs fastapi msgspec numpy pluggy prometheus_client rich torch transformers"


def sources() -> dict[str, str]:
    """Return the text of each module by its name."""
    found = {}
    for path in (path for room in ("core", "plugins", "backends") for path in sorted((ROOT / room).rglob("*.py"))):
        parts = path.relative_to(ROOT).with_suffix("").parts[1:]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return {name: text for name, text in found.items() if not name.endswith("__main__")}


def imports_a_part(text: str) -> bool:
    """Return whether a module says ``import a.b`` of ours, or imports by a call."""
    names = [alias.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import) for alias in node.names]
    return "import_module" in text or any(name.startswith("trencadis") and "." in name for name in names)


def failures(names: Iterable[str], others: str = OTHERS, **environment: str) -> list[str]:
    command = [sys.executable, "-W", "ignore", "-c", FORKS, others, *names]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout.splitlines()


@pytest.mark.parametrize("chosen", [imports_a_part, pytest.param(lambda text: True, marks=pytest.mark.nightly)])
def test_each_module_can_be_imported_first(chosen: Callable[[str], bool]) -> None:
    names = [name for name, text in sources().items() if chosen(text)]
    assert len(names) > 20
    assert failures(names) == []


def test_a_module_that_cannot_be_first_would_be_found(tmp_path: Path) -> None:
    modules = {
        "__init__": "",
        "a": "X = 1\nfrom ours.b import Y\n",
        "b": "import importlib\nY = importlib.import_module('ours.a').X\n",
        "c": "import ours.a\nours.b.Y\n",
        "d": "import ours.a\nours.e.Z\n",
        "e": "import ours.d\nZ = 1\n",
    }
    (tmp_path / "ours").mkdir()
    for name, text in modules.items():
        (tmp_path / "ours" / f"{name}.py").write_text(text)
    lines = failures(["ours.a", "ours.b", "ours.c", "ours.d", "ours.e"], "", PYTHONPATH=str(tmp_path))
    assert [line.split()[0] for line in lines] == ["ours.b", "ours.d", "ours.e"]
