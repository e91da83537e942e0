from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "support" / "import_graph.py"
# Each list is one process. A room stands behind those it needs, and what tests use finds nothing that a backend has imported.
ROOMS = (
    (
        "core/trencadis",
        "plugins/trencadis_plugins",
        "plugins/trencadis_gallery",
        "plugins/trencadis_kv",
        "plugins/trencadis_remote",
        "plugins/trencadis_server",
        "plugins/trencadis_tools",
        "backends/trencadis_torch",
        "backends/trencadis_gaudi",
    ),
    ("core/trencadis_testing",),
)


def _modules(room: str) -> list[str]:
    base = ROOT / room
    names = []
    for path in sorted(base.rglob("*.py")):
        if path.name == "__main__.py":
            continue
        parts = [base.name, *path.relative_to(base).with_suffix("").parts]
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def _failures(prefix: str, names: list[str], *, path: Path | None = None) -> str:
    """Return what the script says of modules that cannot be imported first."""
    environ = {**os.environ, **({} if path is None else {"PYTHONPATH": str(path)})}
    command = [sys.executable, "-W", "ignore", str(SCRIPT), prefix, *names]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("rooms", ROOMS, ids=["engine", "testing"])
def test_each_module_imports_first_without_a_cycle(rooms: tuple[str, ...]) -> None:
    assert _failures("trencadis", [name for room in rooms for name in _modules(room)]) == ""


@pytest.fixture
def house(tmp_path: Path) -> Callable[..., str]:
    """Makes a package ``ours`` of modules, and returns what is said of all of them, imported in their order."""

    def make(**modules: str) -> str:
        (tmp_path / "ours").mkdir()
        for name, text in {"__init__": "", **modules}.items():
            file = tmp_path / "ours" / f"{name.replace('__in__', '/')}.py"
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
        names = [name.replace("__in__", ".").removesuffix(".__init__") for name in modules]
        return _failures("ours", [f"ours.{name}" for name in names], path=tmp_path)

    return make


def test_circle_that_only_breaks_from_the_other_side_is_found(house: Callable[..., str]) -> None:
    """As it is imported here, ``a`` is first, and all is well."""
    said = house(
        a="X = 1\nfrom ours.b import Y\n", b="from ours.c import Z\nY = Z\n", c="from ours.a import X\nZ = X\n"
    )
    assert [line.split()[0] for line in said.splitlines()] == ["ours.b", "ours.c"]


@pytest.mark.slow
def test_circle_through_a_call_is_found(house: Callable[..., str]) -> None:
    said = house(
        late="X = 1\nimport importlib\ndef load():\n    importlib.import_module('ours.other').Y\nload()\n",
        other="from ours.late import X\nY = 1\n",
    )
    assert [line.split()[0] for line in said.splitlines()] == ["ours.other"]


def test_circle_that_does_no_harm_is_none(house: Callable[..., str]) -> None:
    assert (
        house(
            a="import ours.b\n",
            b="import ours.a\n",
            c="def f():\n    from ours.d import D\n",
            d="import ours.c\nD = 1\n",
        )
        == ""
    )


@pytest.mark.slow
def test_module_that_uses_what_others_have_imported_is_found(house: Callable[..., str]) -> None:
    said = house(a="import ours.b.one\n", b__in____init__="", b__in__one="", c="import ours.b\nours.b.one\n")
    assert said.startswith("ours.c AttributeError")
    assert len(said.splitlines()) == 1


@pytest.mark.slow
def test_module_that_cannot_be_imported_at_all_is_found(house: Callable[..., str]) -> None:
    assert house(a="from ours.b import NOTHING\n", b="").startswith("ours.a ImportError")
