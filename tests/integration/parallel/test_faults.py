"""A few runs of ``benchmarks/faults/kill_ranks.py``: whoever is killed or stopped, requests are answered or told, and nothing is left."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "faults" / "kill_ranks.py"
RUNS = (
    ("rank 1", "submit", "kill"),
    ("rank 0", "between", "stop"),
    ("rank 1", "load", "kill"),
    ("template", "between", "kill"),
    ("template", "between", "stop"),
    ("engine", "while ranks start", "stop"),
    ("front end", "between", "kill"),
)


@pytest.fixture
def bench():
    environment, path = dict(os.environ), list(sys.path)
    spec = importlib.util.spec_from_file_location("kill_ranks", SCRIPT)
    module = sys.modules["kill_ranks"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = module.Bench(0)
    yield made
    left = made.close()
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = path
    assert left == []


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes in Linux's /proc")
def test_whoever_is_killed_or_stopped_requests_are_answered_or_told_and_nothing_is_left(bench):
    for run in RUNS:
        made = bench.run(*run)
        allowed = {"cut off"} if run[0] == "front end" else {"answered", "503"}
        assert set(made.outcomes) <= allowed, made
        assert made.left == [], made
        if run[0] in ("rank 0", "rank 1", "template"):
            assert set(made.outcomes) == {"answered"}, made
