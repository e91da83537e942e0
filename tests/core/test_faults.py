"""What a plugin does wrong is said in bounded time and room, once, and with what it took."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest

from trencadis import interfaces, records
from trencadis.clock import SimulatedClock, SystemClock
from trencadis.faults import (
    CallMeter,
    FaultLog,
    as_words,
    members_for,
    num_switched_off,
    reraise_interrupt,
    switched_off,
)
from trencadis.interfaces import SchedulerView, SchedulingPolicy, TokenSplit
from trencadis.pauses import PAUSES
from trencadis.records import Request, SamplingParams
from trencadis_testing.engines import make_engine


def test_a_huge_argument_of_an_error_is_neither_walked_through_nor_printed_whole() -> None:
    reads: list[int] = []

    class Counting(np.ndarray[Any, Any]):
        def __getitem__(self, item: Any) -> Any:
            reads.append(1)
            return super().__getitem__(item)

    huge = np.zeros(50_000_000, np.int8).view(Counting)
    for value in (huge, [0] * 50_000_000, "x" * 50_000_000, {i: i for i in range(300_000)}, set(range(300_000))):
        assert len(as_words(ValueError(value))) < 800
    assert len(reads) < 50


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("no"), "ValueError: no"),
        (KeyError("k"), "KeyError: 'k'"),
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (ValueError([0] * 100), "ValueError: [0, 0, 0, 0, 0, 0, 0, 0, … 100 in all]"),
    ],
)
def test_an_error_is_said_with_its_class(error: BaseException, text: str) -> None:
    assert as_words(error) == text


# ----------------------------------------------------------------------------------------- members that do not exist


def missing(holder: object, name: str) -> AttributeError:
    with pytest.raises(AttributeError) as caught:
        getattr(holder, name)
    return caught.value


def public_records() -> list[type]:
    public = [getattr(module, name) for module in (interfaces, records) for name in module.__all__]
    return [one for one in public if isinstance(one, type) and attrs.has(one)]


def test_a_misspelled_member_of_a_record_is_answered_with_the_nearest_name() -> None:
    error = missing(Request(request_id="a", prompt_token_ids=(1,)), "prompt_tokens")
    said = "AttributeError: 'Request' object has no attribute 'prompt_tokens'"
    assert as_words(error) == f'{said} (did you mean "prompt_token_ids"?)'
    assert members_for(error).startswith('Did you mean "prompt_token_ids"? Request has: ')
    # Where no name is near, those that there are.
    assert "(TokenSplit has: decode, prefill)" in as_words(missing(TokenSplit(1, 2), "zzzz"))


def test_every_public_record_lists_its_fields() -> None:
    for kind in public_records():
        error = AttributeError("no zzzz", name="zzzz", obj=object.__new__(kind))
        listed = members_for(error).partition(" has: ")[2].rstrip(".").split(", ")
        public = {field.name for field in attrs.fields(kind) if not field.name.startswith("_")}
        assert public <= set(listed), kind
        assert "__getattr__" not in dir(kind), "reading a field would be slower"


def test_a_member_of_a_plugins_own_class_is_no_concern_of_ours() -> None:
    class Mine(SchedulingPolicy):
        """Keeps nothing."""

    for holder in (Mine(), np.zeros(1), [], pytest):
        assert members_for(missing(holder, "arival_s")) == ""
    assert members_for(ValueError("arival_s")) == ""


def test_the_log_of_a_misspelled_column_lists_the_columns(caplog: pytest.LogCaptureFixture) -> None:
    error = missing(Request(request_id="a", prompt_token_ids=(1,)), "prompt_tokens")
    FaultLog(logging.getLogger("trencadis")).say("order", "It raised.", error=error)
    assert 'Did you mean "prompt_token_ids"? Request has: ' in caplog.text


# ------------------------------------------------------------------------------------------------------- containment


def test_only_a_ctrl_c_of_the_user_gets_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (SystemExit(1), GeneratorExit(), ValueError()):
        reraise_interrupt(error)
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_IGN)
    reraise_interrupt(KeyboardInterrupt())
    # A shell may have started these tests with Ctrl-C ignored.
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        reraise_interrupt(KeyboardInterrupt())
    passed = []
    thread = threading.Thread(target=lambda: passed.append(reraise_interrupt(KeyboardInterrupt())))
    thread.start()
    thread.join()
    assert passed == [None]


@pytest.mark.parametrize("kind", [SystemExit, TimeoutError])
def test_what_the_handler_of_a_signal_raises_gets_out(kind: type[BaseException]) -> None:
    def handler(*_: object) -> None:
        raise kind("stop")

    class Interrupted(SchedulingPolicy):
        def split(self, view: SchedulerView, *, token_budget: int) -> TokenSplit:
            signal.raise_signal(signal.SIGUSR2)
            return super().split(view, token_budget=token_budget)

    before = signal.signal(signal.SIGUSR2, handler)
    try:
        engine = make_engine(policy=Interrupted(), fallback=True)
        engine.add(Request(request_id="a", prompt_token_ids=(1, 2), params=SamplingParams(max_tokens=2)))
        with pytest.raises(kind, match="stop"):
            engine.step()
        assert engine._policy.num_quarantined == 0
    finally:
        signal.signal(signal.SIGUSR2, before)


# ----------------------------------------------------------------------------------------------------------- logging


def test_a_fault_is_logged_once_with_its_traceback_and_then_counted(caplog: pytest.LogCaptureFixture) -> None:
    now_s = [0.0]
    log = FaultLog(logging.getLogger("trencadis.engine"), timer=lambda: now_s[0])
    for _ in range(5000):
        try:
            raise ValueError("again")
        except ValueError as error:
            log.say("x.order", "x raised.", error=error)
        now_s[0] += 0.01
    assert len(caplog.records) == 1
    assert caplog.text.count("Traceback") == 1
    assert "in test_a_fault_is_logged_once" in caplog.text
    now_s[0] += 60.0
    log.say("x.order", "x raised.", error=ValueError("again"))
    assert [record.getMessage() for record in caplog.records][1:] == [
        "x raised. (5000 times since this was logged last.)"
    ]
    log.say("y.order", "y raised.", error=ValueError("again"))
    assert len(caplog.records) == 3, "another component's fault is another fault"


def test_a_traceback_says_its_cause_and_does_not_print_huge_arguments(caplog: pytest.LogCaptureFixture) -> None:
    log = FaultLog(logging.getLogger("trencadis.engine"))
    try:
        try:
            raise ValueError([0] * 1_000_000)
        except ValueError as cause:
            raise RuntimeError("outer") from cause
    except RuntimeError as error:
        log.say("x", "x raised.", error=error)
    assert "ValueError: [0, 0, 0, 0, 0, 0, 0, 0, … 1000000 in all]" in caplog.text
    assert "RuntimeError: outer" in caplog.text
    assert len(caplog.text) < 5000


def test_a_thousand_different_faults_are_not_remembered_for_ever() -> None:
    log = FaultLog(logging.getLogger("trencadis.engine"))
    for number in range(1000):
        log.say(str(number), "x")
    assert len(log._logged) <= 256


# ----------------------------------------------------------------------------------------------------------- budgets


class Meter:
    """A meter on a clock that moves when a call says so."""

    def __init__(self) -> None:
        self.clock = SimulatedClock()
        self.meter = CallMeter("x of p 1.0", clock=self.clock, budget_s=0.1, setting="[budget] x_ms")

    def call(self, took_s: float, **more: float) -> str:
        began = self.meter.begin()
        self.clock.advance(took_s)
        return self.meter.overran("order", self.meter.end(began), **more)


def test_a_slow_call_is_warned_about_with_its_time_and_the_third_in_a_minute_is_too_many(
    caplog: pytest.LogCaptureFixture,
) -> None:
    meter = Meter()
    assert meter.call(0.25) == ""
    assert "x of p 1.0 took 0.25 s in order(), over its budget of 0.1 s ([budget] x_ms)" in caplog.text
    assert meter.call(0.25) == ""
    assert "3 times within 60 s" in meter.call(0.25)


def test_three_slow_calls_that_lie_far_apart_are_forgiven() -> None:
    meter = Meter()
    for _ in range(9):
        assert meter.call(0.25) == ""
        meter.clock.advance(30.0)


def test_one_call_of_ten_budgets_is_too_many() -> None:
    assert "took 1.5 s in order()" in Meter().call(1.5)
    assert Meter().call(1.5, num_budgets=15.0) == ""


class Spending:
    """A clock of the machine, and a call that keeps the processor, sleeps, or is held up with all others."""

    def __init__(self) -> None:
        self.meter = CallMeter("x of p 1.0", clock=SystemClock(), budget_s=0.05, setting="[budget] x_ms", at_once=2)

    def call(self, do: Callable[[], object]) -> str:
        began = self.meter.begin()
        do()
        return self.meter.overran("order", self.meter.end(began))


def keep_the_processor(seconds: float) -> None:
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


def test_a_call_that_keeps_the_processor_or_sleeps_is_charged_with_it() -> None:
    assert "in order()" in Spending().call(lambda: keep_the_processor(0.6))
    assert "in order()" in Spending().call(lambda: threading.Event().wait(0.7))


def test_a_call_during_which_the_whole_process_stood_still_is_not_slow(caplog: pytest.LogCaptureFixture) -> None:
    def stand_still() -> None:
        began_s = time.perf_counter()
        threading.Event().wait(0.7)
        PAUSES.note(time.perf_counter() - began_s)

    assert Spending().call(stand_still) == ""
    assert not caplog.records


def test_a_call_that_keeps_the_processor_is_slow_although_its_sibling_had_none_of_it() -> None:
    """As one that never lets go of Python's lock."""

    def compute() -> None:
        keep_the_processor(0.6)
        PAUSES.note(0.6)

    assert "in order()" in Spending().call(compute)


def test_a_component_that_is_off_is_due_after_a_minute_and_each_time_later() -> None:
    clock = SimulatedClock()
    meter = CallMeter("slow of p 1.0", clock=clock)
    before = num_switched_off()
    for seconds in (60, 120, 240, 480, 960, 1920, 3600, 3600):
        assert meter.switch_off("it was slow") == f"for {seconds} s"
        clock.advance(seconds - 1)
        assert not meter.is_due
        assert [one.cause for one in switched_off() if one.component == "slow of p 1.0"] == ["it was slow"]
        clock.advance(1)
        assert meter.is_due
        meter.switch_on()
    assert num_switched_off() - before == 8
    assert "slow of p 1.0" not in {one.component for one in switched_off()}
    assert meter.switch_off("it raised", for_good=True) == "for good"
    clock.advance(1e9)
    assert not meter.is_due
