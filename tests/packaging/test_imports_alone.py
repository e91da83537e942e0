from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = (
    "core/trencadis",
    "core/trencadis_testing",
    "plugins/trencadis_plugins",
    "backends/trencadis_torch",
    "backends/trencadis_gaudi",
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


@pytest.mark.parametrize("room", ROOMS)
def test_each_module_imports_first_without_a_cycle(room: str) -> None:
    # One interpreter; what belongs to us is forgotten before each module, so that each is imported first once.
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    for known in [m for m in sys.modules if m.startswith('trencadis')]:\n"
        "        del sys.modules[known]\n"
        "    try:\n"
        "        importlib.import_module(name)\n"
        "    except BaseException as error:\n"
        "        print(name, repr(error))\n"
    )
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *_modules(room)], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (0, ""), result.stderr[-2000:]
