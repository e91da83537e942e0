"""Fails early, in words, if the package under test is not the one in this tree; divides the tests into the default tier and the slow one."""

from __future__ import annotations

import gc
import os
from collections import defaultdict
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from hypothesis import settings

# No test depends on how long one of its examples takes.
settings.register_profile("trencadis", deadline=None)
settings.load_profile("trencadis")

# Tiny tensors on a busy machine: a second thread only waits. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Nothing is fetched: a test that asks a hub for files must fail here as it would offline.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Triton kernels run on the CPU, step by step; where they shall run on a GPU, set it to 0. Read when triton is imported.
os.environ.setdefault("TRITON_INTERPRET", "1")

ROOT = Path(__file__).parents[1]
EVERY_NTH_SUITE = 4
"""In the default tier, a test of a conformance suite of the kit runs for one in so many of the components under test."""
SHARE_OF_EXAMPLES = 4
"""In the default tier, hypothesis tries one in so many of a test's examples, and :data:`FEWEST_EXAMPLES` at least."""
FEWEST_EXAMPLES = 5
EXPECTED = {"bucketing", "eviction", "executor", "kv", "observer", "sampling", "scheduling", "server", "tools", "torch"}


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
    """Mark repeats of a proof ``slow``; without the slow tests, try fewer examples."""
    functions = [item for item in items if isinstance(item, pytest.Function)]
    _mark_repeats(functions)
    if config.getoption("markexpr") == "not slow":
        _try_fewer_examples(functions)


def _mark_repeats(items: Sequence[pytest.Function]) -> None:
    """Mark all but the representatives of parametrised tests and of conformance suites ``slow``.

    Of the parameter sets of a test with ``@pytest.mark.representatives(n)``, n evenly spread ones stay. A suite's tests take turns:
    each component keeps one in :data:`EVERY_NTH_SUITE` of them, and each test is kept by one in as many components.
    """
    families: defaultdict[tuple[object, ...], list[pytest.Function]] = defaultdict(list)
    suites: defaultdict[object, dict[object, list[pytest.Function]]] = defaultdict(dict)
    for item in items:
        if item.get_closest_marker("slow"):
            continue
        if mark := item.get_closest_marker("representatives"):
            families[item.parent, item.originalname, *mark.args].append(item)
        elif item.function.__module__.startswith("trencadis_testing."):
            suites[item.function].setdefault(item.parent, []).append(item)
    repeats = []
    for (*_, kept), members in families.items():
        distance = max(1.0, (len(members) - 1) / max(1, kept - 1))
        stay = {round(number * distance) for number in range(kept)}
        repeats += [member for number, member in enumerate(members) if number not in stay]
    for turn, components in enumerate(suites.values()):
        every = min(EVERY_NTH_SUITE, len(components))
        repeats += [one for number, own in enumerate(components.values()) if (number - turn) % every for one in own]
    for item in repeats:
        item.add_marker(pytest.mark.slow)


def _try_fewer_examples(items: Sequence[pytest.Function]) -> None:
    """Scale the number of examples of each test of hypothesis, which has it at its function or, for state machines, at its class."""
    holders = {}
    for item in items:
        if hasattr(item.function, "_hypothesis_state_machine_class"):
            holders[item.cls] = "settings"
        elif getattr(item.function, "is_hypothesis_test", False):
            holders[item.function] = "_hypothesis_internal_use_settings"
    for holder, name in holders.items():
        full = getattr(holder, name)
        fewest = min(FEWEST_EXAMPLES, full.max_examples)
        setattr(holder, name, settings(full, max_examples=max(fewest, full.max_examples // SHARE_OF_EXAMPLES)))


def pytest_collection_finish() -> None:
    """Leave what lives as long as the run, which is every test and what its file imports, out of garbage collections."""
    gc.collect()
    gc.freeze()
