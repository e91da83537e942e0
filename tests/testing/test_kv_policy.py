"""The KV policy suite passes a small correct policy and fails every broken one, each for the right reason."""

from __future__ import annotations

import time

from support.mutants import broken, proofs
from trencadis_kv.interfaces import KVPolicy
from trencadis_kv.testing.kv_policy import KVPolicyConformance


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


class EveryOtherOne(LongOnes):
    num_asked = 0

    def admits_load(self, view):
        self.num_asked += 1
        return super().admits_load(view) if self.num_asked % 2 else 0.0


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


class TestDefault(KVPolicyConformance):
    make = KVPolicy


class ChoosesByHash(LongOnes):
    def choose_source(self, sources):
        return max(range(len(sources)), key=lambda i: hash(sources[i].name))


MUTANTS = {
    "test_no_more_blocks_are_saved_than_there_are": [
        broken("SavesOneMore", LongOnes, admits_save=lambda self, view: view.num_blocks + 1)
    ],
    "test_waits_are_seconds_from_0_to_the_timeout": [
        broken("WaitsLongerThanItMay", LongOnes, admits_load=lambda self, view: 1.0),
        broken(
            "DividesByWhatNobodyMeasured",
            LongOnes,
            admits_load=lambda self, view: min(view.timeout_s, view.timeout_s * view.compute_s / view.load_s),
        ),
    ],
    "test_a_source_is_chosen_among_those_there_are": [
        broken("ChoosesTheSecond", LongOnes, choose_source=lambda self, sources: 1)
    ],
    "test_prompts_go_to_an_engine_there_is_or_stay": [
        broken("SendsToTheFirst", LongOnes, prefill_at=lambda self, view: 0)
    ],
    "test_failures_are_computed_or_retried": [
        broken("FailsTheRequest", LongOnes, on_failure=lambda self, view: "fail"),
        broken("KnowsEightCauses", LongOnes, on_failure=lambda self, view: {"evicted": "retry"}[view.cause]),
    ],
    "test_retries_come_to_an_end": [
        broken("NeverGivesUp", LongOnes, on_failure=lambda self, view: "retry" if view.cause == "lost" else "compute")
    ],
    "test_same_views_have_same_answers": [EveryOtherOne],
    "test_same_answers_in_a_process_that_hashes_differently": [ChoosesByHash],
    "test_views_are_not_changed": [SortsTheSources],
    "test_answers_take_microseconds": [ThinksLong],
}

test_suite_fails_what_is_broken, test_every_law_has_a_mutant = proofs(KVPolicyConformance, MUTANTS)
