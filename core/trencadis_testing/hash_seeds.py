"""Whether answers hang on the order of hashes: the same history in two processes that hash texts and bytes differently.

suite ▶ pickle ▶ two processes, each with its own PYTHONHASHSEED ▶ a child of each ▶ their answers ▶ compared

Within one process all hashes agree, and so do two strategies that go by the order of a set. A child gets the suite itself, its
class by name and its attributes by value, and finds modules where the parent found them.

The two processes stay until the parent ends. They import the test kit once and fork a child for each comparison, which so begins with
nothing of the one before. Where a process cannot fork, they are started for every comparison.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any, NoReturn, TextIO

__all__ = ["answer_orders", "same_under_other_hashes"]

_SEEDS = (1, 2)
_TIMEOUT_S = 300
_KIT = __name__.rpartition(".")[0] + "."
_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.stdin.readline()); "
    "from trencadis_testing.hash_seeds import answer_orders; answer_orders()"
)
_LATE = {"trencadis.engine.build"}  # what the kit imports only when a test makes an engine
_can_fork = hasattr(os, "fork")


def same_under_other_hashes(suite: object, method: str) -> None:
    """Fail if a method of a suite returns other answers in a process with other hashes.

    Skips the test, in words, if the suite cannot be made in another process: its class, or what its attributes hold, has no
    name that a module knows, or cannot be pickled.

    Args:
        suite: Whose method; pickled.
        method: Takes no arguments and returns a list of what JSON can hold.
    """
    said = _said(suite, method)
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


def _said(suite: object, method: str) -> list[dict[str, Any]]:
    """Return what a child of each process says."""
    try:
        pickled = base64.b64encode(pickle.dumps(suite)).decode()
    except Exception as error:
        _skip(suite, error)
    order = {
        "path": sys.path,
        "directory": os.getcwd(),
        "files": _files(),
        "kit": [one.__module__ for one in type(suite).__mro__ if one.__module__.startswith(_KIT)]
        + sorted(_LATE & sys.modules.keys()),
        "suite": pickled,
        "method": method,
    }
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(_SEEDS)) as pool:
        processes = _lasting() if _can_fork else [stack.enter_context(contextlib.closing(_Process(s))) for s in _SEEDS]
        return list(pool.map(lambda process: process.ask(order), processes))


def _skip(suite: object, error: object) -> None:
    import pytest

    pytest.skip(
        f"{type(suite).__qualname__} cannot be made in another process ({error}), so whether the order of hashes matters was not "
        "tested. Define the class, and what its attributes hold, at the top of a module."
    )


@functools.cache
def _lasting() -> list[_Process]:
    """Return a process for each seed; they end with this one."""
    processes = [_Process(seed) for seed in _SEEDS]
    for process in processes:
        atexit.register(process.close)
    return processes


class _Process:
    """A process whose hashes follow from ``seed``, until the parent ends."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._errors = tempfile.TemporaryFile("a+", encoding="utf-8", errors="replace")  # noqa: SIM115 - till close()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CODE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            encoding="utf-8",
            env=self._environ(),
        )
        self._write(sys.path)

    def ask(self, order: Mapping[str, Any]) -> Any:
        """Return what a child says; fail with what it wrote to its standard error if it ended without an answer."""
        self._errors.truncate(0)
        self._write({**order, "environ": self._environ()})
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        self._errors.seek(0)
        assert said, f"in a process with PYTHONHASHSEED={self._seed}:\n{self._errors.read()[-4000:]}"
        said = json.loads(said)
        assert "code" not in said, (
            f"exit code {said['code']} of a process with PYTHONHASHSEED={self._seed}:\n{self._errors.read()[-4000:]}"
        )
        return said

    def close(self) -> None:
        """End the process."""
        with self._errors, self._process:
            pass

    def _environ(self) -> dict[str, str]:
        return {**os.environ, "PYTHONHASHSEED": str(self._seed), "PYTHONIOENCODING": "utf-8"}

    def _write(self, value: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then there is no answer, and why stands in its errors
            self._process.stdin.write(json.dumps(value) + "\n")
            self._process.stdin.flush()


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


def answer_orders() -> None:
    """Answer the orders on standard input, each in a child of its own: one line of JSON on standard output for each."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # plugins may print
    for line in sys.stdin:
        order = json.loads(line)
        for name in order["kit"]:
            with contextlib.suppress(Exception):  # the child meets it again, and says so
                importlib.import_module(name)
        if not _can_fork:
            answers.write(json.dumps(_child(order)) + "\n")
        elif (pid := os.fork()) == 0:
            _answer_and_end(order, answers)
        elif code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            answers.write(json.dumps({"code": code}) + "\n")
        answers.flush()


def _answer_and_end(order: Mapping[str, Any], answers: TextIO) -> NoReturn:
    code = 1
    try:
        signal.alarm(_TIMEOUT_S)
        os.environ.clear()
        os.environ.update(order["environ"])
        os.chdir(order["directory"])
        sys.path[:] = order["path"]
        answers.write(json.dumps(_child(order)) + "\n")
        answers.flush()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _child(order: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answers of a suite's method, or why the suite cannot be made here."""
    sys.meta_path.append(_ParentsModules(order["files"]))
    try:
        suite = pickle.loads(base64.b64decode(order["suite"]))
    except Exception as error:
        return {"unreachable": f"{type(error).__name__}: {error}"}
    return {"answers": getattr(suite, order["method"])()}
