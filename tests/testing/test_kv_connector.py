"""The KV connector suite passes a small correct connector and fails every broken one, each for the right reason."""

from __future__ import annotations

import json

import attrs
import pytest

from trencadis.interfaces import ConnectorPair, Lookup
from trencadis_testing.doubles import LoopConnector, _LoopScheduler, _LoopWorker
from trencadis_testing.kv_connector import KVConnectorConformance


class Suite(KVConnectorConformance):
    def lose(self, pair):
        pair.worker._store.blocks.clear()


class TestLoopConnector(Suite):
    def make(self):
        return LoopConnector().pair()


class TestSlowLoopConnector(Suite):
    """Loads take three steps, look-ups answer at the third call, and finished blocks are held."""

    def make(self):
        return LoopConnector(delay=3, pending=2, holds=True).pair()


class TestFailingLoopConnector(Suite):
    """Every second load breaks off."""

    loads_again = True

    def make(self):
        return LoopConnector(fail=lambda transfer_id: 4 if transfer_id % 2 and transfer_id > 5 else None).pair()


class TestLoopConnectorByLayer(Suite):
    """Steps wait for layers; some loads break off at the last one, and look-ups answer at the second call."""

    @pytest.fixture(params=[False, True], autouse=True)
    def breaks_off(self, request):
        self.breaks = request.param

    def make(self):
        fails = (
            (lambda transfer_id: 4 if transfer_id % 2 and transfer_id > 5 else None) if self.breaks else lambda _: None
        )
        return LoopConnector(by_layer=True, fail=fails, pending=1, delay=2).pair()


def mutant(*, scheduler=_LoopScheduler, worker=_LoopWorker, **options):
    """Return a maker of pairs that differ from the double in one of its sides."""

    def make():
        store = LoopConnector(**options).store
        return ConnectorPair(scheduler=scheduler(store, 4), worker=worker(store, 4))

    return make


class SavesLate(_LoopWorker):
    """Copies what was offered some steps too late."""

    num_late = 1

    def __init__(self, store, block_size):
        super().__init__(store, block_size)
        self.late = []

    def begin_step(self, message):
        orders = json.loads(message or b"{}")
        self.late.append(orders.get("save", []))
        orders["save"] = self.late.pop(0) if len(self.late) > self.num_late else []
        super().begin_step(json.dumps(orders).encode())


class SavesVeryLate(SavesLate):
    num_late = 20


class ClaimsAnyKnown(_LoopScheduler):
    def lookup(self, request, *, block_hashes, num_local_tokens):
        num_known = sum(block_hash.hex() in self._store.blocks for block_hash in block_hashes)
        return Lookup(num_tokens=4 * num_known, transfer_id=next(self._transfer_ids)) if num_known else Lookup()


class ClaimsEverything(_LoopScheduler):
    def lookup(self, request, *, block_hashes, num_local_tokens):
        return Lookup(num_tokens=4 * len(block_hashes) or 4, transfer_id=next(self._transfer_ids))


class AlwaysTheSameTransferId(_LoopScheduler):
    def lookup(self, request, *, block_hashes, num_local_tokens):
        found = super().lookup(request, block_hashes=block_hashes, num_local_tokens=num_local_tokens)
        return attrs.evolve(found, transfer_id=1) if found.num_tokens else found


class DropsWhatWasNotUsed(_LoopScheduler):
    def on_unused(self, transfer_id):
        self._store.blocks.clear()


class RepeatsItself(_LoopScheduler):
    last = b""

    def take_message(self):
        self.last = super().take_message() or self.last
        return self.last


class NeedsAMessage(_LoopWorker):
    def begin_step(self, message):
        json.loads(message)
        super().begin_step(message)


class NeverReleases(_LoopWorker):
    def poll(self):
        return attrs.evolve(super().poll(), released=())


class ReleasesAtOnce(_LoopWorker):
    """Says that a cancelled load is over, and lets it arrive three steps later."""

    def __init__(self, store, block_size):
        super().__init__(store, block_size)
        self.flying = []

    def begin_step(self, message):
        for transfer_id in json.loads(message or b"{}").get("cancel", []):
            self.flying.append([3, *self._loads.get(transfer_id, [0, [], []])[1:]])
        super().begin_step(message)

    def poll(self):
        for load in self.flying:
            load[0] -= 1
            if load[0] == 0:
                self._copy_in(load[1], load[2])
        report = super().poll()
        return attrs.evolve(report, released=tuple({*report.released, *self._releases}))


class KeepsFinishedBlocks(_LoopWorker):
    def begin_step(self, message):
        orders = json.loads(message or b"{}")
        orders.pop("hold", None)
        super().begin_step(json.dumps(orders).encode())


class CallsLostLoadsGood(_LoopWorker):
    def _num_valid_tokens(self, transfer_id, hashes):
        return len(hashes) * self._block_size, ""


class WritesAfterClose(_LoopWorker):
    """A transfer that was not stopped lands behind the first close."""

    flying = ()

    def close(self):
        for _, blocks, hashes in self.flying:
            self._copy_in(blocks, hashes)
        self.flying = list(self._loads.values())
        super().close()


class ClosesOnce(_LoopWorker):
    def close(self):
        del self._loads


class NeverLoads(_LoopScheduler):
    def lookup(self, request, *, block_hashes, num_local_tokens):
        return Lookup()


class ForgetsCancelledTransferIds(_LoopScheduler):
    def on_cancelled(self, transfer_id):
        pass


class LoadsAnotherPromptsBlock(_LoopWorker):
    """Whole and valid, but not what was asked for."""

    def _copy_in(self, blocks, hashes):
        known = list(self._store.blocks)
        super()._copy_in(blocks, [known[known.index(one) - 1] if one in known else one for one in hashes])


class ReportsTwice(_LoopWorker):
    last = ()

    def poll(self):
        report = super().poll()
        twice = attrs.evolve(report, loaded=(*self.last, *report.loaded))
        self.last = report.loaded
        return twice


class VouchesTooEarly(_LoopWorker):
    """Brings all layers when the step is over."""

    def wait_layer(self, layer, *, budget_s):
        return True

    def poll(self):
        if self._layered:
            for layer in range(3):
                super().wait_layer(layer, budget_s=0.0)
        return super().poll()


class ForgetsToReportLayers(_LoopWorker):
    def poll(self):
        for transfer_id in self._layered:
            del self._loads[transfer_id]
        self._layered = {}
        return super().poll()


class LoadsAfterGivingUp(_LoopWorker):
    def wait_layer(self, layer, *, budget_s):
        return super().wait_layer(layer, budget_s=budget_s) and budget_s > 0.0


class CopiesLayersWhenTheStepIsOver(_LoopWorker):
    def expect_layers(self):
        self.expects = True

    def begin_step(self, message):
        orders = json.loads(message or b"{}")
        self.late = orders.pop("save", []) if getattr(self, "expects", False) else []
        super().begin_step(json.dumps(orders).encode())

    def end_step(self):
        super().end_step()
        super().begin_step(json.dumps({"save": self.late}).encode())


MUTANTS = {
    "CopiesLayersWhenTheStepIsOver": (
        mutant(worker=CopiesLayersWhenTheStepIsOver),
        "test_layer_of_a_save_is_copied_before_it_is_overwritten",
    ),
    "LoadsAnotherPromptsBlock": (mutant(worker=LoadsAnotherPromptsBlock), "test_what_was_saved_is_loaded_bit_for_bit"),
    "LoadsAnotherPromptsBlock in engines": (
        mutant(worker=LoadsAnotherPromptsBlock),
        "test_texts_are_those_without_a_connector",
    ),
    "ReportsTwice": (mutant(worker=ReportsTwice), "test_prompt_that_comes_back_is_loaded"),
    "SavesLate": (mutant(worker=SavesLate), "test_what_was_saved_is_loaded_bit_for_bit"),
    "SavesVeryLate": (mutant(worker=SavesVeryLate), "test_preempted_sequences_come_back"),
    "ClaimsAnyKnown": (
        mutant(scheduler=ClaimsAnyKnown),
        "test_lookup_claims_no_more_than_a_leading_run_of_what_was_saved",
    ),
    "ClaimsEverything": (mutant(scheduler=ClaimsEverything), "test_prompt_that_nobody_saved_is_a_miss"),
    "AlwaysTheSameTransferId": (mutant(scheduler=AlwaysTheSameTransferId), "test_transfer_ids_are_unique"),
    "DropsWhatWasNotUsed": (
        mutant(scheduler=DropsWhatWasNotUsed),
        "test_hit_that_is_not_used_is_found_again",
    ),
    "RepeatsItself": (mutant(scheduler=RepeatsItself), "test_message_is_taken_once"),
    "NeedsAMessage": (mutant(worker=NeedsAMessage), "test_empty_messages_are_harmless"),
    "NeverReleases": (
        mutant(worker=NeverReleases),
        "test_cancelled_load_is_released_and_touches_nothing_from_then_on",
    ),
    "ReleasesAtOnce": (
        mutant(worker=ReleasesAtOnce, delay=2),
        "test_cancelled_load_is_released_and_touches_nothing_from_then_on",
    ),
    "KeepsFinishedBlocks": (mutant(worker=KeepsFinishedBlocks, holds=True), "test_held_blocks_are_released"),
    "CallsLostLoadsGood": (
        mutant(worker=CallsLostLoadsGood),
        "test_what_is_lost_between_the_lookup_and_the_load_is_a_failed_load",
    ),
    "ClosesOnce": (mutant(worker=ClosesOnce), "test_closed_worker_touches_nothing"),
    "WritesAfterClose": (mutant(worker=WritesAfterClose, delay=3), "test_closed_worker_touches_nothing"),
    "NeverLoads": (mutant(scheduler=NeverLoads), "test_prompt_that_comes_back_is_loaded"),
    "ForgetsCancelledTransferIds": (
        mutant(scheduler=ForgetsCancelledTransferIds, delay=3),
        "test_loads_that_take_too_long_are_given_up",
    ),
    "ForgetsAborted": (
        mutant(scheduler=ForgetsCancelledTransferIds, delay=3),
        "test_aborts_at_any_step_leave_nothing_behind",
    ),
    "VouchesTooEarly": (
        mutant(worker=VouchesTooEarly, by_layer=True),
        "test_layer_that_was_waited_for_is_there_or_its_load_is_not_loaded",
    ),
    "ForgetsToReportLayers": (
        mutant(worker=ForgetsToReportLayers, by_layer=True),
        "test_layer_that_was_waited_for_is_there_or_its_load_is_not_loaded",
    ),
    "LoadsAfterGivingUp": (
        mutant(worker=LoadsAfterGivingUp, by_layer=True),
        "test_layers_that_may_not_be_waited_for_are_given_up",
    ),
}


@pytest.mark.representatives(10)
@pytest.mark.parametrize(("make", "test"), MUTANTS.values(), ids=MUTANTS)
def test_suite_fails_a_broken_connector(failures_of, make, test):
    assert failures_of(Suite, make, only=test)


def test_every_test_of_the_suite_is_needed_by_a_mutant():
    assert {test for _, test in MUTANTS.values()} == {name for name in dir(Suite) if name.startswith("test_")}
