from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from trencadis import startup
from trencadis.activity import ACTIVITY
from trencadis.clock import Phases, SimulatedClock, in_words
from trencadis.startup import (
    RARELY,
    Ledger,
    LedgerEntry,
    keep_last_start,
    last_start,
    rare_collections,
)


@pytest.fixture
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_phases_leave_no_gap() -> None:
    clock = SimulatedClock(100.0)
    phases = Phases(clock, "one")
    clock.advance(1.0)
    phases.begin("two")
    clock.advance(0.25)
    phases.begin("one")
    clock.advance(2.0)
    assert phases.end() == "3.2 s: one 3.0 s, two 0.2 s"
    assert phases.took_s == {"one": 3.0, "two": 0.25}
    assert sum(phases.took_s.values()) == clock.now_s() - 100.0


def test_the_phase_that_runs_is_noted_for_those_who_wait() -> None:
    phases = Phases(SimulatedClock(), "one")
    assert ACTIVITY.read().part == "one"
    phases.begin("two")
    phases.end()
    assert ACTIVITY.read().part == "two"


def test_the_sum_is_of_what_was_measured_not_of_what_was_rounded() -> None:
    assert in_words({"a": 0.04, "b": 0.04, "c": 0.04}) == "0.1 s: a 0.0 s, b 0.0 s, c 0.0 s"


@pytest.mark.usefixtures("thresholds")
def test_collections_are_rare_inside_and_as_before_behind() -> None:
    gc.set_threshold(701, 11, 12)
    inside = []

    def fail() -> None:
        with rare_collections():
            inside.append(gc.get_threshold())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert inside == [(RARELY, 11, 12)]
    assert gc.get_threshold() == (701, 11, 12)


@pytest.mark.usefixtures("thresholds")
@pytest.mark.parametrize("young", [0, 10 * RARELY])
def test_whoever_collects_even_less_is_left_alone(young: int) -> None:
    gc.set_threshold(young, 11, 12)
    with rare_collections():
        assert gc.get_threshold() == (young, 11, 12)
    assert gc.get_threshold() == (young, 11, 12)


@pytest.mark.usefixtures("thresholds")
def test_contexts_that_overlap_end_in_any_order() -> None:
    gc.set_threshold(701, 11, 12)
    first, second = ExitStack(), ExitStack()
    first.enter_context(rare_collections())
    second.enter_context(rare_collections())
    first.close()
    assert gc.get_threshold() == (RARELY, 11, 12)
    second.close()
    assert gc.get_threshold() == (701, 11, 12)


# ------------------------------------------------------------------------------------------------------- the ledger


class Times:
    """Seconds since a process started, as a test sets them."""

    now_s = 0.5

    def __call__(self) -> float:
        return self.now_s


def test_a_ledger_begins_with_the_process_and_has_no_gap() -> None:
    times = Times()
    ledger = Ledger(times)
    ledger.begin("command")
    times.now_s = 0.75
    ledger.begin("kernels")
    ledger.note_cache(found=True)
    ledger.note_cache(found=False)
    ledger.note_cache(found=True)
    times.now_s = 2.0
    ledger.begin("command")
    times.now_s = 4.0
    assert ledger.close()
    assert ledger.entries == (
        LedgerEntry("python", 0.5, None),
        LedgerEntry("command", 2.25, None),
        LedgerEntry("kernels", 1.25, False),
    )
    assert ledger.in_words() == "4.00 s: python 0.50 s, command 2.25 s, kernels 1.25 s (not from cache)"


def test_what_comes_after_a_start_is_none() -> None:
    times = Times()
    ledger = Ledger(times)
    assert ledger.close()
    times.now_s = 9.0
    ledger.begin("later")
    ledger.note_cache(found=True)
    assert not ledger.close()
    assert ledger.entries == (LedgerEntry("python", 0.5, None),)


def test_a_ledger_takes_in_that_of_a_process_it_waited_for_without_a_gap() -> None:
    times = Times()
    ledger = Ledger(times)
    ledger.begin("engine process")
    times.now_s = 4.0
    ledger.include(
        [LedgerEntry("python", 0.25, None), LedgerEntry("imports", 2.0, None), LedgerEntry("kernels", 1.0, True)]
    )
    times.now_s = 4.5
    ledger.close()
    assert ledger.entries == (
        LedgerEntry("python", 0.5, None),
        LedgerEntry("engine process", 0.75, None),
        LedgerEntry("engine's python", 0.25, None),
        LedgerEntry("imports", 2.0, None),
        LedgerEntry("kernels", 1.0, True),
    )
    ledger.include([LedgerEntry("late", 9.0, None)])
    assert sum(entry.seconds for entry in ledger.entries) == 4.5


def test_what_was_taken_in_is_no_longer_than_the_wait_for_it() -> None:
    times = Times()
    ledger = Ledger(times)
    ledger.begin("engine process")
    times.now_s = 1.5
    ledger.include([LedgerEntry("imports", 0.75, None), LedgerEntry("weights", 0.26, None)])
    assert [entry.seconds for entry in ledger.entries] == [0.5, 0.0, 0.75, 0.25]


@pytest.mark.parametrize("is_part", [False, True])
def test_a_start_is_told_once_and_by_the_process_that_began_it(
    is_part: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(startup, "LEDGER", Ledger(Times()))
    monkeypatch.setattr(startup, "_own", True)
    startup.LEDGER.is_part = is_part
    with caplog.at_level("INFO", "trencadis.engine"):
        startup.end_start("demo")
        startup.end_start("another")
    assert (
        [record.getMessage() for record in caplog.records] == []
        if is_part
        else ["The start took 0.50 s: python 0.50 s."]
    )
    assert (last_start() or ("", ()))[0] == ("" if is_part else "demo")


def test_a_ledger_is_a_gauge_for_each_phase() -> None:
    ledger = Ledger(Times())
    ledger.begin("kernels")
    ledger.note_cache(found=True)
    ledger.close()
    assert 'trencadis_start_seconds{phase="python",cached=""} 0.500\n' in ledger.metrics()
    assert 'trencadis_start_seconds{phase="kernels",cached="yes"} 0.000\n' in ledger.metrics()


def test_the_last_start_is_kept_for_those_who_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert last_start() is None
    ledger = Ledger(Times())
    ledger.close()
    keep_last_start("demo", ledger)
    assert last_start() == ("demo", ledger.entries)
    (file,) = tmp_path.rglob("*.json")
    for damage in ("", "[]", '{"model": "demo", "phases": [["a", "b", null]]}', '{"model": "demo", "phases": 3}'):
        file.write_text(damage)
        assert last_start() is None
