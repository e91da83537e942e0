"""Whether answers hang on the order of hashes: the same history in two processes that hash texts and bytes differently.

suite ▶ pickle ▶ two children, each with its own PYTHONHASHSEED ▶ their answers ▶ compared

Within one process all hashes agree, and so do two strategies that go by the order of a set. A child gets the suite itself, its
class by name and its attributes by value, and finds modules where the parent found them.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

__all__ = ["child", "same_under_other_hashes"]

_SEEDS = (1, 2)
_TIMEOUT_S = 300.0
_CHILD = (
    "import json, sys; order = json.load(sys.stdin); sys.path[:] = order['path']; "
    "from trencadis_testing.hash_seeds import child; child(order)"
)


def same_under_other_hashes(suite: object, method: str) -> None:
    """Fail if a method of a suite returns other answers in a process with other hashes.

    Skips the test, in words, if the suite cannot be made in another process: its class, or what its attributes hold, has no
    name that a module knows, or cannot be pickled.

    Args:
        suite: Whose method; pickled.
        method: Takes no arguments and returns a list of what JSON can hold.
    """
    try:
        pickled = base64.b64encode(pickle.dumps(suite)).decode()
    except Exception as error:
        _skip(suite, error)
    order = json.dumps({"path": sys.path, "files": _files(), "suite": pickled, "method": method})
    with ThreadPoolExecutor(len(_SEEDS)) as pool:
        said = [json.loads(text) for text in pool.map(lambda seed: _run(seed, order), _SEEDS)]
    for one in said:
        if "unreachable" in one:
            _skip(suite, one["unreachable"])
    first, second = (one["answers"] for one in said)
    assert len(first) == len(second), f"{len(first)} and {len(second)} answers in processes that hash texts differently"
    for number, (answer, other) in enumerate(zip(first, second, strict=True)):
        assert answer == other, (
            f"answer {number} to the same calls is {answer} with PYTHONHASHSEED={_SEEDS[0]} and {other} with {_SEEDS[1]}: do not go "
            "by hash() or by the order of a set of texts or bytes; sort, or keep a dict"
        )


def _skip(suite: object, error: object) -> None:
    import pytest

    pytest.skip(
        f"{type(suite).__qualname__} cannot be made in another process ({error}), so whether the order of hashes matters was not "
        "tested. Define the class, and what its attributes hold, at the top of a module."
    )


def _run(seed: int, order: str) -> str:
    """Return what a child says whose hashes follow from ``seed``."""
    done = subprocess.run(
        [sys.executable, "-c", _CHILD],
        input=order,
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONIOENCODING": "utf-8"},
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"in a process with PYTHONHASHSEED={seed}:\n{done.stderr[-4000:]}"
    return done.stdout


def _files() -> dict[str, str]:
    """Return the file of every loaded module, empty for a package without one."""
    loaded = {name: getattr(module, "__file__", None) or "" for name, module in list(sys.modules.items())}
    return {name: file for name, file in loaded.items() if not file or file.endswith(".py")}


# ------------------------------------------------------------------------------------------------- in the child


class _ParentsModules(importlib.abc.MetaPathFinder):
    """Finds test modules that pytest imports by their path, under names that ``sys.path`` does not lead to."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._files = files

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return where the parent found the module; None if it did not."""
        if fullname not in self._files:
            return None
        file = self._files[fullname]
        if file:
            return importlib.util.spec_from_file_location(fullname, file)
        return importlib.machinery.ModuleSpec(fullname, None, is_package=True)


def child(order: Mapping[str, Any]) -> None:
    """Write the answers of a suite's method as JSON, or why the suite cannot be made here."""
    sys.meta_path.append(_ParentsModules(order["files"]))
    with contextlib.redirect_stdout(sys.stderr):
        said = _said(order)
    sys.stdout.write(json.dumps(said))


def _said(order: Mapping[str, Any]) -> dict[str, Any]:
    try:
        suite = pickle.loads(base64.b64decode(order["suite"]))
    except Exception as error:
        return {"unreachable": f"{type(error).__name__}: {error}"}
    return {"answers": getattr(suite, order["method"])()}
