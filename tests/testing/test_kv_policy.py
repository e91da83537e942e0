"""The KV policy suite passes a small correct policy and fails every broken one, each for the right reason."""

from __future__ import annotations

import math
import time

import pytest

from trencadis_kv.interfaces import KVPolicy
from trencadis_kv.testing.kv_policy import KVPolicyConformance, load_view


class LongOnes(KVPolicy):
    """Correct: moves what is long, and tries each prefix twice. Each mutant breaks one thing."""

    def admits_save(self, view):
        return view.num_blocks if view.num_blocks > 1 else 0

    def admits_load(self, view):
        return min(1.0, view.timeout_s) if view.num_tokens >= 64 else 0.0

    def choose_source(self, sources):
        return len(sources) - 1

    def on_failure(self, view):
        return "retry" if view.num_attempts < 2 else "compute"


class TestLongOnes(KVPolicyConformance):
    make = LongOnes


class SavesOneMore(LongOnes):
    def admits_save(self, view):
        return view.num_blocks + 1


class SavesAShare(LongOnes):
    def admits_save(self, view):
        return view.num_blocks * (1 - view.staged_fraction)


class WaitsForever(LongOnes):
    def admits_load(self, view):
        return math.inf


class WaitsLongerThanItMay(LongOnes):
    def admits_load(self, view):
        return 1.0


class DividesByWhatNobodyMeasured(LongOnes):
    def admits_load(self, view):
        return min(view.timeout_s, view.timeout_s * view.compute_s / view.load_s)


class PropagatesNan(LongOnes):
    def admits_load(self, view):
        return 0.5 * view.compute_s


class ChoosesByName(LongOnes):
    def choose_source(self, sources):
        return sources[0].name


class ChoosesTheSecond(LongOnes):
    def choose_source(self, sources):
        return 1


class SendsToTheFirst(LongOnes):
    def prefill_at(self, view):
        return 0


class SendsByName(LongOnes):
    def prefill_at(self, view):
        return view.engines[-1].name if view.engines else None


class FailsTheRequest(LongOnes):
    def on_failure(self, view):
        return "fail"


class KnowsEightCauses(LongOnes):
    def on_failure(self, view):
        return {"evicted": "retry"}[view.cause]


class NeverGivesUp(LongOnes):
    def on_failure(self, view):
        return "retry" if view.cause == "lost" else "compute"


class EveryOtherOne(LongOnes):
    num_asked = 0

    def admits_load(self, view):
        self.num_asked += 1
        return super().admits_load(view) if self.num_asked % 2 else 0.0


class ChoosesByHash(LongOnes):
    def choose_source(self, sources):
        return max(range(len(sources)), key=lambda i: hash(sources[i].name))


class SortsTheSources(LongOnes):
    def choose_source(self, sources):
        sources.sort(key=lambda source: -source.num_tokens)
        return 0


class ThinksLong(LongOnes):
    def on_failure(self, view):
        end = time.perf_counter() + 0.003
        while time.perf_counter() < end:
            pass
        return "compute"


MUTANTS = {
    SavesOneMore: "test_no_more_blocks_are_saved_than_there_are",
    SavesAShare: "test_no_more_blocks_are_saved_than_there_are",
    WaitsForever: "test_waits_are_seconds_from_0_to_the_timeout",
    WaitsLongerThanItMay: "test_waits_are_seconds_from_0_to_the_timeout",
    DividesByWhatNobodyMeasured: "test_waits_are_seconds_from_0_to_the_timeout",
    PropagatesNan: "test_waits_are_seconds_from_0_to_the_timeout",
    ChoosesByName: "test_a_source_is_chosen_among_those_there_are",
    ChoosesTheSecond: "test_a_source_is_chosen_among_those_there_are",
    SendsToTheFirst: "test_prompts_go_to_an_engine_there_is_or_stay",
    SendsByName: "test_prompts_go_to_an_engine_there_is_or_stay",
    FailsTheRequest: "test_failures_are_computed_or_retried",
    KnowsEightCauses: "test_failures_are_computed_or_retried",
    NeverGivesUp: "test_retries_come_to_an_end",
    EveryOtherOne: "test_same_views_have_same_answers",
    ChoosesByHash: "test_same_answers_in_a_process_that_hashes_differently",
    SortsTheSources: "test_views_are_not_changed",
    ThinksLong: "test_answers_take_microseconds",
}


@pytest.mark.parametrize(("mutant", "test"), MUTANTS.items(), ids=[mutant.__name__ for mutant in MUTANTS])
def test_suite_fails_a_broken_policy(failures_of, mutant, test):
    assert failures_of(KVPolicyConformance, mutant, only=test)


def test_suite_passes_what_is_correct(failures_of):
    assert failures_of(KVPolicyConformance, LongOnes) == set()
    assert failures_of(KVPolicyConformance, KVPolicy) == set()


def test_every_test_of_the_suite_is_needed_by_a_mutant():
    assert set(MUTANTS.values()) == {name for name in dir(KVPolicyConformance) if name.startswith("test_")}


def test_suite_without_make_says_what_to_do():
    with pytest.raises(NotImplementedError, match="make = YourPolicy"):
        KVPolicyConformance().make()


def test_a_view_has_what_was_asked_for():
    view = load_view(32, load_s=0.1, compute_s=0.2, timeout_s=3.0, num_local_tokens=8, bytes_per_token=10)
    assert (view.num_tokens, view.load_s, view.compute_s, view.timeout_s) == (32, 0.1, 0.2, 3.0)
    assert (view.num_local_tokens, view.num_bytes) == (8, 320)
