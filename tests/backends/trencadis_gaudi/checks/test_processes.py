"""A process that dies or hangs is what the check found that ran then; faults are planted in the child's process."""

from __future__ import annotations

import sys

import attrs
import pytest

from trencadis_gaudi.checks.cards import sum_over
from trencadis_gaudi.checks.processes import run_group
from trencadis_gaudi.checks.records import Status
from trencadis_gaudi.config import GaudiConfig

EMULATED = attrs.asdict(GaudiConfig(device="emulated"))
START = """
import os, sys, time
from trencadis_gaudi.checks import child, software
{plant}
sys.exit(child.main(sys.argv))
"""
DIES = "software.autoload = lambda config: os.abort()"
HANGS = "software.autoload = lambda config: time.sleep(600)"


def results(plant="", *, group="software", options=EMULATED, **named):
    found = []
    start = [sys.executable, "-c", START.format(plant=plant)]
    run_group(group, options, timeout_s=named.pop("timeout_s", 60.0), note=found.append, child=start, **named)
    return {result.check.name: result for result in found}


def test_process_that_dies_is_found_by_the_check_that_ran_and_the_rest_runs_in_another():
    found = results(f"{DIES}\nprint('stack of the driver')")
    assert list(found) == ["release", "autoload", "default mode"]
    assert [result.status for result in found.values()] == [Status.SKIP, Status.WARN, Status.SKIP]
    assert found["autoload"].found == "the process was ended by SIGABRT; it printed last: stack of the driver"
    assert "not tested: the emulated device" in found["default mode"].found


@pytest.mark.slow
def test_process_that_hangs_is_ended_and_found():
    found = results(HANGS, timeout_s=2.0)
    assert [result.status for result in found.values()] == [Status.SKIP, Status.WARN, Status.SKIP]
    assert found["autoload"].found == "did not end within 2 s"
    assert found["autoload"].seconds >= 2


@pytest.mark.slow
def test_process_that_does_not_reach_a_check_is_a_failure_of_its_own():
    found = results("raise ImportError('libSynapse.so: cannot open shared object file')")
    assert found["process"].status is Status.FAIL
    assert "exit code 1; it printed last" in found["process"].found
    assert "libSynapse.so" in found["process"].found
    assert {found[name].found for name in ("release", "autoload", "default mode")} == {
        "not tested: the process ended before it"
    }


@pytest.mark.slow
def test_process_that_dies_after_its_last_check_is_a_failure_beside_its_results():
    found = results("import atexit; atexit.register(os._exit, 9)")
    assert [result.status for result in found.values()] == [Status.SKIP] * 3 + [Status.FAIL]
    assert found["process"].found == "the process ended with exit code 9"


@pytest.mark.slow
def test_process_that_dies_in_every_check_is_started_a_few_times(monkeypatch):
    monkeypatch.setattr("trencadis_gaudi.checks.processes._MOST_DEATHS", 2)
    found = results("import trencadis_gaudi.checks.records as r; r.Check.function = lambda self: os._exit(7)")
    assert [result.found for result in found.values()] == [
        "the process ended with exit code 7",
        "the process ended with exit code 7",
        "not tested: the process ended before it",
    ]


@pytest.mark.nightly  # in the group that imports no torch: above
def test_a_check_in_a_mode_that_dies_leaves_the_others_right():
    plant = "from trencadis_gaudi.checks import numbers\nnumbers.integers = lambda bench: os.abort()"
    found = results(plant, group="eager", only=["device", "64-bit integers", "float64"])
    assert {name: result.status for name, result in found.items()} == {
        "device": Status.OK,
        "64-bit integers": Status.FAIL,
        "float64": Status.OK,
    }


@pytest.mark.nightly  # processes that fail: below
def test_sum_over_processes_is_their_number():
    found = sum_over(2, backend="gloo", device="cpu")
    assert (found.holds, found.text) == (True, "2 devices sum to 2.0, 2.0")


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_processes_that_cannot_reach_each_other_are_named_with_their_error(count):
    found = sum_over(count, backend="hccl", device="hpu")
    assert found.holds is False
    assert found.text.startswith(f"{count} devices sum to {', '.join(['nothing'] * count)}: ")
    assert "habana_frameworks" in found.text
