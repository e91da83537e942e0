"""The observer suite passes a small correct observer and fails every broken one, each for the right reason."""

from __future__ import annotations

import time

import attrs
from prometheus_client.parser import text_string_to_metric_families

from support.mutants import broken, leaves_a_thread, proofs
from trencadis.interfaces import Observer
from trencadis.records import StepStats
from trencadis_kv.store.counters import TransferCounters
from trencadis_server.http_metrics import HttpMetrics
from trencadis_testing.observer import SAMPLE_STEPS, SHOWN_METRICS, ObserverConformance, step_stats


class Totals(Observer):
    """Correct: two sums. Each mutant breaks one thing."""

    def __init__(self):
        self.num_tokens = 0
        self.waited_s = 0.0

    def on_step(self, stats):
        self.num_tokens += stats.num_scheduled_tokens

    def on_request(self, finished):
        if finished.first_token_s is not None:
            self.waited_s += finished.first_token_s - finished.arrival_s


class TestTotals(ObserverConformance):
    make = Totals


class DividesByPadding(Totals):
    def on_step(self, stats):
        self.padding_ratio = 1 - stats.num_scheduled_tokens / stats.num_padded_tokens


class DividesByElapsedTime(Totals):
    last_s = -1.0

    def on_step(self, stats):
        self.rate = stats.num_emitted_tokens / (stats.now_s - self.last_s)
        self.last_s = stats.now_s


class NeedsAFirstToken(Totals):
    def on_request(self, finished):
        self.waited_s += finished.first_token_s - finished.arrival_s


class ClosesOnce(Totals):
    closed = False

    def close(self):
        if self.closed:
            raise RuntimeError("closed already")
        self.closed = True


class ChangesTokens(Totals):
    def on_request(self, finished):
        finished.token_ids[:] = -1


class KeepsSteps(Totals):
    def __init__(self):
        super().__init__()
        self.steps = []

    def on_step(self, stats):
        self.steps.append(stats)


class KeepsSequences(Totals):
    def __init__(self):
        super().__init__()
        self.sequences = []

    def on_request(self, finished):
        self.sequences.append(finished)


class TakesAGlobalName(Totals):
    taken = None

    def on_step(self, stats):
        if type(self).taken not in (None, self):
            type(self).taken = None
            raise ValueError("the name is taken by another observer")
        type(self).taken = self

    def close(self):
        type(self).taken = None


class MetricsNeedAStep(Totals):
    num_steps = 0

    def on_step(self, stats):
        self.num_steps += 1

    def metrics(self):
        return f"tokens_per_step {self.num_tokens / self.num_steps}\n"


class MetricsNeedAnOpenObserver(Totals):
    totals = ()

    def close(self):
        self.totals = None

    def metrics(self):
        return f"totals {len(self.totals)}\n"


class RemembersEveryRequest(Totals):
    def __init__(self):
        super().__init__()
        self.seen = set()

    def on_request(self, finished):
        self.seen.add(finished.request_id)


MUTANTS = {
    "test_metrics_are_text_for_prometheus_at_any_time": [
        broken("MetricsStandThereTwice", Totals, metrics=lambda self: "tokens 1.0\nother 1.0\ntokens 2.0\n"),
        broken("MetricsAreBytes", Totals, metrics=lambda self: b"tokens 1.0\n"),
        MetricsNeedAStep,
        MetricsNeedAnOpenObserver,
        broken("MetricsOfTheWholeProcess", Totals, metrics=lambda self: "process_cpu_seconds_total 1.0\n"),
    ],
    "test_nothing_is_kept_of_requests_that_ended": [RemembersEveryRequest],
    "test_no_thread_outlives_close": [leaves_a_thread(Totals)],
    "test_any_step_may_come_first": [
        DividesByPadding,
        broken("NeedsSmallNumbers", Totals, on_step=lambda self, stats: stats.num_scheduled_tokens.to_bytes(4, "big")),
    ],
    "test_any_finished_sequence_may_come_first": [NeedsAFirstToken],
    "test_steps_and_sequences_may_come_mixed": [DividesByElapsedTime],
    "test_close_may_come_twice_and_without_a_step": [ClosesOnce],
    "test_records_are_not_changed": [ChangesTokens],
    "test_records_are_not_kept": [KeepsSteps, KeepsSequences],
    "test_steps_and_sequences_take_microseconds": [
        broken("WaitsForADisk", Totals, on_step=lambda self, stats: time.sleep(0.003)),
        broken("WaitsForANetwork", Totals, on_request=lambda self, finished: time.sleep(0.003)),
    ],
    "test_two_observers_live_side_by_side": [TakesAGlobalName],
}

test_suite_fails_what_is_broken, test_every_law_has_a_mutant = proofs(ObserverConformance, MUTANTS)


def test_step_stats_are_zero_but_for_what_is_given():
    values = attrs.asdict(step_stats(step=4, device_s=0.5))
    assert {name: value for name, value in values.items() if value} == {"step": 4, "device_s": 0.5}
    types = {field.name: str(field.type).partition("[")[0] for field in attrs.fields(StepStats)}
    assert {name: type(value).__name__ for name, value in values.items()} == types


def test_sample_steps_are_in_order_of_time_and_reach_every_field():
    times = [step.now_s for step in SAMPLE_STEPS.values()]
    assert times == sorted(times)
    for field in attrs.fields(StepStats):
        assert len({repr(getattr(step, field.name)) for step in SAMPLE_STEPS.values()}) > 1, field.name


def test_the_families_that_an_observer_cannot_have_are_those_of_the_server_and_of_kv_connectors():
    texts = TransferCounters("any").text(), HttpMetrics().text(engine_up=True)
    families = {family.name for text in texts for family in text_string_to_metric_families(text)}
    assert {name.removesuffix("_total") for name in families} == SHOWN_METRICS
