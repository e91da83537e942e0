"""The stage suite passes the built-in stages and a small correct one, and fails every broken one, each for the right reason."""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from typing import ClassVar

import attrs
import numpy as np
import pytest

from trencadis.engine.sequences import Claim, When
from trencadis.engine.stage import Stage
from trencadis.errors import InvalidRequestError, RanksLostError
from trencadis.interfaces import StageDefinition
from trencadis.records import FinishReason
from trencadis_stages import trencadis_stages
from trencadis_testing import StageConformance

BUILT_IN = {one.name: one for one in trencadis_stages()}


class TestSwap(StageConformance):
    definition = BUILT_IN["swap"]
    engine: ClassVar = {"preemption": "swap"}


class TestSwapWithoutPrefixCaching(StageConformance):
    definition = BUILT_IN["swap"]
    engine: ClassVar = {"preemption": "swap", "prefix_caching": False, "swap_blocks": 8}


class TestDefragmenter(StageConformance):
    definition = BUILT_IN["defragmenter"]
    engine: ClassVar = {"defragmenter": {"enabled": "on", "threshold": 1}}
    backend: ClassVar = {"layout": "padded", "contiguous": True}
    stands_beside_transfers = False


class TestPartitions(StageConformance):
    definition = BUILT_IN["partitions"]
    engine: ClassVar = {"attention_ranks": 2}


class TestPipeline(StageConformance):
    definition = BUILT_IN["pipeline"]
    engine: ClassVar = {"pipeline": 3}


class TestPreparation(StageConformance):
    definition = BUILT_IN["preparation"]

    @staticmethod
    def _prepared(params, tenant):
        future = Future()
        future.set_result(None)
        return (future,)

    engine: ClassVar = {"prepare": _prepared}


class Counts(Stage):
    """Correct: holds every second sequence back once, and counts. Each mutant breaks one thing."""

    def __init__(self):
        self.num_left = 0
        self._asked = set()

    def bind(self, engine):
        self._state = engine.state

    def claim(self, sequence, *, num_found):
        if sequence.slot % 2 == 0 or sequence.slot in self._asked:
            return None
        self._asked.add(sequence.slot)
        return _pending()

    def leaving(self, sequence, leaving):
        self._asked.discard(sequence.slot)

    def left(self, finished):
        self.num_left += 1


def _pending():
    claim = Claim()
    claim.when, claim.reason = When.PENDING, "it comes in the next plan"
    return claim


def counting(stage=Counts, **changes):
    return attrs.evolve(
        StageDefinition(name="counts", make=lambda _: stage(), summary="Counts."),
        **changes,
    )


class TestCounts(StageConformance):
    definition = counting()


class KeepsBlocks(Counts):
    def leaving(self, sequence, leaving):
        leaving.num_kept_blocks = min(1, len(leaving.blocks))


class MiscountsKeptBlocks(Counts):
    def left(self, finished):
        self._state.num_kept_blocks += 1


class HoldsBackForEver(Counts):
    def claim(self, sequence, *, num_found):
        return _pending()


class SetsAsideForEver(Counts):
    def added(self, sequence):
        return "thinking" if sequence.slot == 1 else ""


class ClaimsWhatIsNotThere(Counts):
    def claim(self, sequence, *, num_found):
        claim = Claim()
        claim.num_tokens = len(sequence.tokens) - 1
        return claim


class ChangesStreamedTokens(Counts):
    def after_step(self, step, output, deltas):
        return attrs.evolve(deltas, token_ids=(deltas.token_ids + 1).astype(np.int32))


class ForgetsWhoEnded(Counts):
    def after_step(self, step, output, deltas):
        return attrs.evolve(deltas, finished=())


class CutsPrompts(Counts):
    def accept(self, request):
        return attrs.evolve(request, prompt_token_ids=request.prompt_token_ids[:8])


class RefusesTenants(Counts):
    def accept(self, request):
        if request.tenant == "a":
            raise InvalidRequestError("not a")
        return request


class BreaksWhenStepsFail(Counts):
    def failed(self, plans, error):
        raise ValueError("nobody expects that")


class BreaksWhenOneIsAborted(Counts):
    def leaving(self, sequence, leaving):
        super().leaving(sequence, leaving)
        if not len(leaving.blocks) and leaving.reason is not None:
            raise ValueError("it holds nothing")


class AlwaysWantsAStep(Counts):
    wants_step = True


class RemembersRequests(Counts):
    def __init__(self):
        super().__init__()
        self._ids = []

    def left(self, finished):
        self._ids.append(finished.request_id)


class Renamed(Counts):
    def bind(self, engine):
        super().bind(engine)
        self.name = "another"


NUMBERS = itertools.count()


class DependsOnTheProcess(Counts):
    def __init__(self):
        super().__init__()
        self._odd = next(NUMBERS) % 2
        self._times = 0

    def claim(self, sequence, *, num_found):
        self._times += 1
        return _pending() if self._odd and self._times % 3 else None


class ReservesForWhoIsRefused(Counts):
    def accept(self, request):
        self._state.num_kept_blocks += 1
        return request

    def added(self, sequence):
        self._state.num_kept_blocks -= 1
        return ""


class KnowsNoLostRanks(Counts):
    def failed(self, plans, error):
        if isinstance(error, RanksLostError):
            raise ValueError("it never heard of lost ranks")


class ResumesWhatOthersLoad(Counts):
    def before_step(self):
        for slot in list(self._state.aside):
            self._state.resume(self._state.table.sequence(slot), front=True)


class KnowsWhoEndsOnlyIfItRan(Counts):
    def leaving(self, sequence, leaving):
        super().leaving(sequence, leaving)
        if leaving.reason is FinishReason.ERROR and sequence.first_scheduled_s is None:
            raise ValueError("it never ran")


class WaitsForACallThatFailed(Counts):
    def __init__(self):
        super().__init__()
        self._held = []

    def added(self, sequence):
        self._held.append(sequence)
        return "held for a step"

    def after_step(self, step, output, deltas):
        while self._held and self._state.aside:
            sequence = self._held.pop()
            if sequence.slot in self._state.aside:
                self._state.resume(sequence, front=False)
        return deltas

    def leaving(self, sequence, leaving):
        self._held.clear()


SHARED = Counts()
TEXTS = ("no_text_changes_and_nothing_is_held_in_the_end", {"seed": 1, "place": "between"})
ENGINE = ("engine_has_the_stage_under_its_name", {})
DEFINITION = ("definition_is_complete", {})


@pytest.mark.representatives(100)
@pytest.mark.parametrize(
    ("definition", "test", "complaint"),
    [
        (counting(KeepsBlocks), TEXTS, "still holds .* blocks with a reference"),
        (counting(MiscountsKeptBlocks), TEXTS, "num_kept_blocks"),
        (counting(HoldsBackForEver), TEXTS, "not come to rest"),
        (counting(SetsAsideForEver), TEXTS, "not come to rest"),
        (counting(ClaimsWhatIsNotThere), TEXTS, "steps failed"),
        (counting(ChangesStreamedTokens), TEXTS, "its client got"),
        (counting(ForgetsWhoEnded), TEXTS, "has not ended|KeyError"),
        (counting(CutsPrompts), TEXTS, "its text is"),
        (counting(RefusesTenants), TEXTS, "not a"),
        (counting(BreaksWhenStepsFail), ("failed_steps_are_contained", {"seed": 0}), "nobody expects that"),
        (
            counting(BreaksWhenOneIsAborted),
            ("aborted_requests_leave_nothing", {"num_steps": 0}),
            "it holds nothing",
        ),
        (
            counting(ReservesForWhoIsRefused),
            ("refused_requests_leave_nothing", {"seed": 1, "accepts_last": True}),
            "num_kept_blocks",
        ),
        (counting(KnowsNoLostRanks), ("lost_ranks_lose_no_text", {"seed": 0}), "never heard"),
        (counting(ResumesWhatOthersLoad), ("it_stands_beside_kv_transfers", {"seed": 0, "pending": 0}), r"^\d+$"),
        (
            counting(KnowsWhoEndsOnlyIfItRan),
            ("faults_of_other_stages_reach_no_further", {"moment": "added"}),
            "see the log",
        ),
        (counting(WaitsForACallThatFailed), ("its_own_faults_reach_no_further", {}), "not come to rest"),
        (counting(AlwaysWantsAStep), ("idle_engine_rests", {}), "not come to rest"),
        (counting(RemembersRequests), ("nothing_is_kept_of_requests_that_ended", {}), "bytes with each request"),
        (counting(DependsOnTheProcess), ("same_requests_give_the_same_steps", {"seed": 1}), "steps differ"),
        (counting(Renamed), ENGINE, "no stage of the engine has the name 'counts'"),
        (counting(when=lambda _: False), ENGINE, "no stage of the engine has the name 'counts'"),
        (counting(make=lambda _: SHARED), ENGINE, "share one stage"),
        (counting(name="Counts everything"), DEFINITION, "lower-case"),
        (counting(summary=""), DEFINITION, "one line"),
        (counting(before={"counts"}), DEFINITION, "before itself"),
    ],
    ids=lambda value: getattr(value, "name", None) or None,
)
def test_suite_fails_a_broken_stage(definition, test, complaint) -> None:
    class Suite(StageConformance):
        pass

    Suite.definition = definition
    name, arguments = test
    with pytest.raises(Exception, match=complaint):
        getattr(Suite(), f"test_{name}")(**arguments)
