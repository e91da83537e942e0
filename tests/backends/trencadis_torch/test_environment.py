from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest

from trencadis_torch import preload
from trencadis_torch.environment import set_environment
from trencadis_torch.light_imports import Placeholder


def test_threads_spin_for_a_moment_and_sleep_while_they_wait():
    environ = {"PATH": "/bin"}
    set_environment(environ, {})
    assert environ == {"PATH": "/bin", "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "500"}


@pytest.mark.parametrize("said", [{"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "100"}])
def test_what_somebody_has_said_stays(said):
    environ = dict(said)
    set_environment(environ, {})
    assert environ == said


def test_nothing_is_set_that_nobody_would_read():
    environ: dict[str, str] = {}
    set_environment(environ, {"torch": object()})
    assert environ == {}


@pytest.mark.parametrize("begun", [False, True])
def test_cuda_that_an_import_has_begun_is_found_by_a_process_that_is_forked(begun):
    torch = types.SimpleNamespace(cuda=types.SimpleNamespace(_is_in_bad_fork=lambda: begun))
    assert preload._has_begun_cuda(torch) is begun


def test_preloading_leaves_no_thread_and_no_variable(monkeypatch):
    monkeypatch.delenv(preload._NVML_CHECK, raising=False)
    before = threading.active_count()
    preload.preload()
    assert threading.active_count() == before
    assert preload._NVML_CHECK not in os.environ


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package ``heavy`` with a module, that imports another one of its own."""
    folder = tmp_path / "heavy"
    folder.mkdir()
    (folder / "__init__.py").write_text("from heavy import early\nreal = True\ndef double(x): return 2 * x\n")
    (folder / "early.py").write_text("loads = globals().get('loads', 0) + 1\n")
    (folder / "late.py").write_text("here = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(sys.meta_path)
    yield "heavy"
    sys.meta_path[:] = before
    for name in [name for name in sys.modules if name.split(".")[0] == "heavy"]:
        del sys.modules[name]


def test_what_is_given_is_had_without_the_package(package: str) -> None:
    Placeholder(package, {"double": lambda x: x + x}).take_place()
    from heavy import double

    assert double(2) == 4
    assert "heavy.early" not in sys.modules


def test_anything_else_imports_the_package_once_and_tells_it(package: str) -> None:
    told = []
    one = Placeholder(package, {}, then=told.append)
    one.take_place()
    from heavy import real

    assert real
    assert told == [sys.modules["heavy"]]
    assert sys.modules["heavy"] is not one
    assert one.become_real() is sys.modules["heavy"]
    assert one.double(4) == 8
    assert len(told) == 1


@pytest.mark.parametrize("module", ["early", "late"])
def test_a_module_of_the_package_imports_the_package(package: str, module: str) -> None:
    Placeholder(package, {}).take_place()
    found = importlib.import_module(f"heavy.{module}")
    assert found is sys.modules[f"heavy.{module}"]
    assert found.__spec__.origin.endswith(f"{module}.py")
    assert sys.modules["heavy"].real
    assert getattr(sys.modules["heavy"], module) is found


def test_those_who_look_through_all_modules_import_nothing(package: str) -> None:
    Placeholder(package, {}).take_place()
    for module in list(sys.modules.values()):
        hasattr(module, "__file__")
    assert "heavy.early" not in sys.modules


PROGRAM = """
import sys
from trencadis_torch import light_imports as light
import torch
light.import_transformers()
assert not {"sympy.core", "torch._dynamo.utils", "torch.distributed.tensor", "scipy.optimize"} & set(sys.modules)
import torch
from transformers.integrations.flex_attention import WrappedFlexAttention
with torch.device("meta"):
    torch.nn.Embedding(4, 4), torch.nn.Linear(4, 4), 1.0 / 3.0 ** (torch.arange(0, 8, 2, dtype=torch.int64) / 8)
assert "sympy.core" not in sys.modules
answers = light._OF_NUMBERS
assert torch.compile(lambda x: x.sin() + 1, backend="eager")(torch.zeros(2)).tolist() == [1.0, 1.0]
assert "torch._dynamo.utils" in sys.modules
from transformers.integrations import deepgemm
import torch._dynamo.trace_rules as rules
marked = [one for one in vars(deepgemm).values() if getattr(one, "_dynamo_marked_constant", False)]
assert marked, "what was noted of decorators is not given to the real ones"
from torch.fx.experimental import symbolic_shapes as real
import inspect
samples = {"sym_eq": [((1, 2), (1, 2)), ((1, 2), (1, 3)), ((1,), (1, 2)), (3, 3)], "sym_and": [(True, False), (True, True)]}
samples["sym_or"] = [(True, False), (False, False)]
for name, answer in answers.items():
    for values in samples.get(name, [(True,), (False,)] if "hint" not in name and "nested" not in name else [(3,), (0,)]):
        assert answer(*values) == getattr(real, name)(*values), (name, values)
print("the same")
"""


@pytest.mark.slow
def test_what_was_left_out_comes_when_it_is_asked_for() -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert result.stdout == "the same\n", result.stderr[-3000:]
