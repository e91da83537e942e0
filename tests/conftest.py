"""Fails early, in words, if the package under test is not the one in this tree; divides the tests into tiers."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from hypothesis import settings

from support.reproducible import draw_alike
from support.tiers import CI, DEFAULT, is_of_hypothesis, mark_nightly, mark_repeats, try_fewer_examples

# No test depends on how long one of its examples takes.
settings.register_profile("trencadis", deadline=None)
settings.load_profile("trencadis")

# Tiny tensors on a busy machine: a second thread only waits. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Nothing is fetched: a test that asks a hub for files must fail here as it would offline.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Each test loads its own models; those of what is remembered between starts say so.
os.environ.setdefault("TRENCADIS_CACHE__MODELS", "off")

ROOT = Path(__file__).parents[1]
EXPECTED = {
    *("bucketing", "eviction", "executor", "gallery", "kv", "observer", "sampling", "scheduling"),
    *("server", "tools", "torch"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", default="cpu", help="of the backend torch in tests: cpu, which hides CUDA devices, cuda or cuda:N"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Set the environment for a device, which torch, triton, ``support.devices`` and child processes read."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell: commands would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    device = os.environ["PYTEST_TORCH_DEVICE"] = config.getoption("device")
    # Triton kernels run on the CPU, step by step.
    os.environ.setdefault("TRITON_INTERPRET", "1" if device == "cpu" else "0")
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if not hasattr(config, "workerinput"):  # workers inherit it
        state = tempfile.TemporaryDirectory(prefix="trencadis-tests-")
        config.add_cleanup(state.cleanup)
        os.environ["XDG_STATE_HOME"] = state.name  # flight records of faults


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Run the tests of one file in this process: a worker takes seconds to start."""
    files = {argument.split("::")[0] for argument in config.args}
    return 0 if len(files) == 1 and Path(*files).is_file() else None


def pytest_sessionstart() -> None:
    import trencadis

    if ROOT not in Path(trencadis.__file__).parents:
        pytest.exit(f"trencadis is imported from {trencadis.__file__}, not from {ROOT}: pip install -e '.[dev]'", 2)
    missing = EXPECTED - {entry.name for entry in entry_points(group="trencadis")}
    if missing:
        pytest.exit(f"entry points {sorted(missing)} are not installed: pip install -e '.[dev]' again", 2)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark repeats of a proof ``slow`` and ``nightly``; without these, try fewer examples. At night all examples are tried."""
    functions = [item for item in items if isinstance(item, pytest.Function)]
    mark_nightly(functions)
    mark_repeats(functions)
    chosen = config.getoption("markexpr")
    for tier in (DEFAULT, CI):
        if chosen == f"not {tier.marker}":
            try_fewer_examples(functions, tier)
    if chosen == CI.marker:
        config.option.trencadis_all_histories = True
        for item in filter(is_of_hypothesis, functions):
            item.add_marker(CI.marker)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture, so that one which several tests share holds the same whichever of them comes first."""
    draw_alike(item.nodeid)


@pytest.fixture(autouse=True)
def level_of_logs() -> Iterator[None]:
    """Give the loggers of Trencadís their level back, which commands set for their process."""
    yield
    logging.getLogger("trencadis").setLevel(logging.NOTSET)
    if (log := sys.modules.get("trencadis.log")) is not None:
        log._level = ""  # else an engine that is loaded later would set it again


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for garbage neither while tests are collected nor among them later: every test lives as long as the run.

    Else a tenth of the time of collecting goes into that.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
