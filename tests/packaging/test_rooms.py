"""Which modules the import contracts name; that they hold is said by ``lint-imports``, which ``.ci/run`` runs."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_import_contracts_have_no_exceptions() -> None:
    assert "ignore_imports" not in (ROOT / "pyproject.toml").read_text()


def test_every_module_of_the_core_is_public_or_protected() -> None:
    """A module that is added is in one of the lists: the contracts allow what is listed, and nothing else."""
    public = {
        *(
            "caches",
            "clock",
            "errors",
            "faults",
            "files",
            "gguf_file",
            "hookspecs",
            "interfaces",
            "processes",
            "records",
        ),
    }
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    protected = {
        module.removeprefix("trencadis.")
        for contract in contracts
        if contract["type"] == "protected"
        for module in contract["protected_modules"]
        if module.startswith("trencadis.")
    }
    core = ROOT / "core" / "trencadis"

    def modules_in(folder: Path) -> set[str]:
        found = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
        return found - {"__init__", "__main__"}

    # Of the engine some modules are open to stages, and each of the others is closed by name: with its room, or one by one.
    listed = modules_in(core) - {"engine"}
    for room in modules_in(core / "engine"):
        is_divided = any(name.startswith(f"engine.{room}.") for name in protected)
        modules = {f"engine.{room}.{name}" for name in modules_in(core / "engine" / room)} if is_divided else set()
        listed |= modules or {f"engine.{room}"}
    assert listed == public | protected
    assert not public & protected
