from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = frozenset(
    init.parent.name for room in ("core", "plugins", "backends") for init in ROOT.glob(f"{room}/*/__init__.py")
)


def imported(text: str) -> Iterator[tuple[str, str]]:
    """Yield module and name of every import of these packages, at whatever place; the name is empty where a module is imported."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.partition(".")[0] in PACKAGES)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in PACKAGES:
            yield from ((node.module, alias.name) for alias in node.names)


def is_there(module: str, name: str) -> bool:
    try:
        if not name or hasattr(importlib.import_module(module), name):
            return bool(importlib.import_module(module))
        return bool(importlib.import_module(f"{module}.{name}"))
    except ModuleNotFoundError as error:
        # else it is there, and needs what is not installed
        return error.name is not None and error.name.partition(".")[0] not in PACKAGES


def test_what_scripts_import_of_the_packages_is_there() -> None:
    scripts = [script for folder in ("benchmarks", "examples", "tools") for script in (ROOT / folder).rglob("*.py")]
    found = {(script, *one) for script in scripts for one in imported(script.read_text(encoding="utf-8"))}
    assert len(found) > 100
    gone = [
        f"{script.relative_to(ROOT)}: {module} {name}" for script, module, name in found if not is_there(module, name)
    ]
    assert sorted(gone) == []


def test_an_import_that_has_moved_is_found() -> None:
    text = "def late():\n    from trencadis_tools.compare.lab import scipy_stats\nimport trencadis.records, numpy\n"
    assert set(imported(text)) == {("trencadis_tools.compare.lab", "scipy_stats"), ("trencadis.records", "")}
    assert not is_there("trencadis_tools.compare.lab", "scipy_stats")
    assert is_there("trencadis.records", "")
    assert is_there("trencadis.records", "Request")
    assert not is_there("trencadis.records", "NoSuchRecord")
