"""Conformance suite of the noun ``observer``."""

from __future__ import annotations

import gc
import statistics
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from trencadis.interfaces import Observer
from trencadis.records import Bucket, EngineGauges, FinishedSequence, FinishReason, Pass, Phase, StepStats
from trencadis.startup import Ledger
from trencadis_testing.doubles import LoopConnector
from trencadis_testing.engines import make_engine
from trencadis_testing.resources import ends_its_threads, growth_bytes

__all__ = ["SAMPLE_REQUESTS", "SAMPLE_STEPS", "SHOWN_METRICS", "ObserverConformance", "finished_sequence", "step_stats"]


SHOWN_METRICS = frozenset(
    [
        "process_cpu_seconds",
        "process_max_fds",
        "process_open_fds",
        "process_resident_memory_bytes",
        "process_start_time_seconds",
        "process_virtual_memory_bytes",
        "trencadis_admitted_requests",
        "trencadis_admitted_waiting_tokens",
        "trencadis_engine_restarts",
        "trencadis_engine_restarts_created",
        "trencadis_engine_up",
        "trencadis_event_loop_held_seconds",
        "trencadis_event_loop_lag_seconds",
        "trencadis_http_request_duration_seconds",
        "trencadis_http_requests",
        "trencadis_http_requests_in_flight",
        "trencadis_http_requests_refused",
        "trencadis_http_requests_refused_created",
        "trencadis_http_response_bytes",
        "trencadis_http_response_bytes_created",
        "trencadis_http_threads",
        "trencadis_kv_breaker_state",
        "trencadis_kv_bytes",
        "trencadis_kv_dropped_saves",
        "trencadis_kv_load_seconds",
        "trencadis_kv_lookup_seconds",
        "trencadis_kv_lookups",
        "trencadis_kv_staged_bytes",
        "trencadis_kv_tokens",
        "trencadis_kv_transfer_failures",
    ]
)
"""Families that the server and KV connectors show on ``/metrics``; an observer cannot have one of them."""

_MAX_CALL_S = 2.5e-3
"""Fifty times what the contract says: clocks of shared machines are noisy."""

_MAX_GROWTH_BYTES = 32.0
"""For each step and request: a kept request id takes more than 50."""


def step_stats(**values: Any) -> StepStats:
    """Return a step in which nothing happened, but for ``values``. Pure."""
    zeros: dict[str, Any] = {"int": 0, "float": 0.0, "str": "", "tuple[int, ...]": (), "tuple[Pass, ...]": ()}
    nothing = {field.name: zeros[str(field.type)] for field in attrs.fields(StepStats)}
    return StepStats(**(nothing | values))


def finished_sequence(*, num_output_tokens: int = 0, reason: FinishReason = FinishReason.STOP) -> FinishedSequence:
    """Return a sequence that ended before it was scheduled. Pure; ``attrs.evolve`` changes more."""
    return FinishedSequence(
        request_id="request-0",
        slot=0,
        token_ids=np.arange(num_output_tokens, dtype=np.int32),
        finish_reason=reason,
        num_prompt_tokens=1,
    )


_PASSES = tuple(
    Pass(
        bucket=Bucket(len(starts), max(lengths), 8, phase),
        indices=np.arange(first, first + len(starts), dtype=np.int32),
        rows=np.arange(first, first + len(starts), dtype=np.int32),
        starts=np.array(starts, np.int32),
        query_lens=np.array(lengths, np.int32),
        num_logits=np.ones(len(starts), np.int32),
        num_prompt_logits=np.zeros(len(starts), np.int32),
    )
    for first, starts, lengths, phase in ((0, (32,), (68,), Phase.PREFILL), (1, (10, 40), (1, 1), Phase.DECODE))
)
"""A prompt with 32 cached tokens, and two decodes."""

_BUSY = step_stats(
    step=1,
    now_s=0.5,
    num_running=3,
    num_waiting=2,
    num_sequences=3,
    num_scheduled_tokens=70,
    num_padded_tokens=96,
    num_emitted_tokens=3,
    num_preempted=1,
    num_finished=1,
    num_prompt_tokens_cached=32,
    num_prompt_tokens_admitted=100,
    num_recomputed_tokens=10,
    num_draft_tokens=4,
    num_accepted_tokens=2,
    num_drafted_sequences=2,
    num_drafted_by_position=(2, 1, 1),
    num_accepted_by_position=(1, 1, 0),
    draft_s=0.0002,
    num_free_blocks=5,
    num_cached_blocks=7,
    num_used_blocks=11,
    plan_s=0.001,
    device_s=0.02,
    commit_s=0.0005,
    start_s=0.4,
    num_admitted=1,
    passes=_PASSES,
)
_HUGE = step_stats(
    **{field.name: 1e12 if field.name.endswith("_s") else 2**62 for field in attrs.fields(StepStats)}
    | {
        "policy": "huge",
        "passes": (),
        "num_drafted_by_position": (2**62,) * 64,
        "num_accepted_by_position": (2**61,) * 64,
    },
)

SAMPLE_STEPS = {
    "nothing": step_stats(),
    "busy": _BUSY,
    "same_moment": attrs.evolve(_BUSY, step=2),
    "only_free_blocks": step_stats(step=3, now_s=1.0, num_free_blocks=10),
    "much_later": attrs.evolve(_BUSY, step=4, now_s=1e6),
    "huge": _HUGE,
}
"""Steps that every observer must cope with, in this order, by name."""

SAMPLE_REQUESTS = {
    "never_scheduled": finished_sequence(reason=FinishReason.ABORT),
    "failed": attrs.evolve(finished_sequence(reason=FinishReason.ERROR), error="device lost", first_scheduled_s=0.5),
    "no_output": attrs.evolve(finished_sequence(reason=FinishReason.LENGTH), first_scheduled_s=0.5, finish_s=1.0),
    "one_token": attrs.evolve(
        finished_sequence(num_output_tokens=1), first_scheduled_s=0.5, first_token_s=1.0, finish_s=1.0, stop_token_id=0
    ),
    "many_tokens": attrs.evolve(
        finished_sequence(),
        token_ids=np.arange(1000, 0, -1, dtype=np.int32),  # in no order that sorting would keep
        num_prompt_tokens=2**31,
        num_cached_tokens=2**30,
        num_preemptions=7,
        first_scheduled_s=1.0,
        first_token_s=2.0,
        finish_s=1e9,
    ),
}
"""Finished sequences that every observer must cope with, by name."""


class ObserverConformance:
    """What every observer must do; inherit from it, and set ``make``.

    The engine contains what an observer raises, but counts it and warns: none of these records may make it raise.
    Example::

        class TestPager(ObserverConformance):
            make = Pager
    """

    def make(self) -> Observer:
        """Return a new observer that has seen nothing."""
        raise NotImplementedError(f"{type(self).__name__} needs make = YourObserver, or a method make(self)")

    @pytest.mark.parametrize("name", SAMPLE_STEPS)
    def test_any_step_may_come_first(self, name: str) -> None:
        """Zeros, equal times and huge counts are all legal."""
        observer = self.make()
        observer.on_step(SAMPLE_STEPS[name])
        observer.close()

    @pytest.mark.parametrize("name", SAMPLE_REQUESTS)
    def test_any_finished_sequence_may_come_first(self, name: str) -> None:
        """Times that never happened are None, and there may be no output."""
        observer = self.make()
        observer.on_request(_copy(SAMPLE_REQUESTS[name]))
        observer.close()

    def test_steps_and_sequences_may_come_mixed(self) -> None:
        """Sequences end between steps in an engine."""
        observer = self.make()
        for step in SAMPLE_STEPS.values():
            observer.on_step(step)
            for finished in SAMPLE_REQUESTS.values():
                observer.on_request(_copy(finished))
        observer.close()

    def test_close_may_come_twice_and_without_a_step(self) -> None:
        """An engine that fails to start closes what it has; one that fails to close tries again."""
        unused, used = self.make(), self.make()
        used.on_step(SAMPLE_STEPS["busy"])
        for observer in (unused, used):
            observer.close()
            observer.close()

    def test_records_are_not_changed(self) -> None:
        """The token ids are the ones that the client is given."""
        observer = self.make()
        for name, before in SAMPLE_REQUESTS.items():
            finished = _copy(before)
            observer.on_request(finished)
            assert finished == before, f"the sequence {name} was changed: {finished}"
        observer.close()

    def test_metrics_are_text_for_prometheus_at_any_time(self) -> None:
        """Before the first step, after each step and sequence, and after ``close``; beside what the engine counts itself."""
        observer, taken = self.make(), _names_of_the_engine()
        observer.on_scrape(EngineGauges(num_free_blocks=64))
        _check_metrics(observer.metrics(), taken, "before the first step")
        for name, step in SAMPLE_STEPS.items():
            observer.on_step(step)
            _check_metrics(observer.metrics(), taken, f"after the step {name}")
        for name, finished in SAMPLE_REQUESTS.items():
            observer.on_request(_copy(finished))
            _check_metrics(observer.metrics(), taken, f"after the sequence {name}")
        observer.close()
        _check_metrics(observer.metrics(), taken, "after close()")

    def test_records_are_not_kept(self) -> None:
        """All but the last one may be freed: an engine runs for months."""
        observer = self.make()
        steps = [attrs.evolve(_BUSY, step=i, now_s=float(i)) for i in range(20)]
        sequences = [finished_sequence(num_output_tokens=2) for _ in range(20)]
        for step, finished in zip(steps, sequences, strict=True):
            observer.on_step(step)
            observer.on_request(finished)
        kept_steps = _num_alive_after_clearing(steps)
        kept_sequences = _num_alive_after_clearing(sequences)
        assert kept_steps <= 1, f"{kept_steps} of 20 StepStats are still referenced"
        assert kept_sequences <= 1, f"{kept_sequences} of 20 FinishedSequence are still referenced"
        observer.close()

    def test_steps_and_sequences_take_microseconds(self) -> None:
        """The engine thread waits for them; half of the calls may take longer."""
        observer = self.make()
        per_step_s = _median_s(lambda: observer.on_step(_BUSY))
        finished = _copy(SAMPLE_REQUESTS["many_tokens"])
        per_sequence_s = _median_s(lambda: observer.on_request(finished))
        observer.close()
        assert per_step_s < _MAX_CALL_S, f"on_step() takes {per_step_s * 1e3:.1f} ms"
        assert per_sequence_s < _MAX_CALL_S, f"on_request() takes {per_sequence_s * 1e3:.1f} ms"

    def test_nothing_is_kept_of_requests_that_ended(self) -> None:
        """An engine runs for months, and request ids never end: what grows has a bound."""
        observer = self.make()
        blank = finished_sequence(num_output_tokens=2)

        def end(number: int) -> None:
            observer.on_step(attrs.evolve(_BUSY, step=number, now_s=float(number)))
            observer.on_request(attrs.evolve(blank, request_id=f"request {number}", arrival_s=float(number)))

        growth = growth_bytes(end)
        observer.close()
        assert growth < _MAX_GROWTH_BYTES, f"it grows by {growth:.0f} bytes with each step and request"

    def test_no_thread_outlives_close(self) -> None:
        """Engines come and go in one process."""
        with ends_its_threads("the observer"):
            observer = self.make()
            observer.on_step(_BUSY)
            observer.close()

    def test_two_observers_live_side_by_side(self) -> None:
        """Two engines in one process have one each: names must not collide in a global registry."""
        first, second = self.make(), self.make()
        for observer in (first, second):
            observer.on_step(SAMPLE_STEPS["busy"])
        first.close()
        second.on_step(SAMPLE_STEPS["much_later"])
        second.close()


def _copy(finished: FinishedSequence) -> FinishedSequence:
    """A sequence of its own for each test: its token ids can be written to, as the engine's can."""
    return attrs.evolve(finished, token_ids=finished.token_ids.copy())


def _median_s(call: Callable[[], None]) -> float:
    times_s = []
    for _ in range(50):
        begin_s = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - begin_s)
    return statistics.median(times_s)


def _names_of_the_engine() -> set[str]:
    """Return the families that ``/metrics`` has without any observer: Prometheus refuses an answer that has one of them twice."""
    engine = make_engine(connector=LoopConnector().pair(), explain_steps=1)
    shown = engine.metrics() + Ledger().metrics()
    return _families(shown) | SHOWN_METRICS


def _families(text: str) -> set[str]:
    names = [family.name.removesuffix("_total") for family in text_string_to_metric_families(text)]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"families that stand there twice: {sorted(twice)}")
    return set(names)


def _check_metrics(text: object, taken: set[str], when: str) -> None:
    assert isinstance(text, str), f"metrics() returned {text!r} {when}, no text"
    try:
        names = _families(text)
    except ValueError as error:
        raise AssertionError(f"metrics() returned {text!r} {when}, which Prometheus cannot read: {error}") from error
    assert not names & taken, f"metrics() has families of the engine's own {when}: {sorted(names & taken)}"


def _num_alive_after_clearing(records: list[StepStats] | list[FinishedSequence]) -> int:
    watched: Sequence[weakref.ref[StepStats | FinishedSequence]] = [weakref.ref(record) for record in records]
    records.clear()
    gc.collect()
    return sum(reference() is not None for reference in watched)
