"""Random histories keep the invariants under policies of several kinds, and find faults planted in the engine itself."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from support.core.engine_machine import EngineMachine
from trencadis.engine.cache.block_manager import BlockManager
from trencadis.engine.cache.hashing import BlockHasher
from trencadis.engine.commit.committer import Committer
from trencadis.engine.engine import Engine
from trencadis.engine.request_validation import RequestValidator
from trencadis.engine.scheduling.admission import Admission
from trencadis.engine.scheduling.scheduler import Preemptor, Scheduler
from trencadis.engine.state import EngineState
from trencadis.interfaces import SchedulerView, SchedulingPolicy
from trencadis_plugins.scheduling.fair_share import FairShare
from trencadis_plugins.scheduling.priority import Priority
from trencadis_stages.swap.swapping import Swapping
from trencadis_stages.transfer.transfers import Transfers
from trencadis_stages.transfer.waiting_load import WaitingLoad
from trencadis_testing.engines import ServeInOrder
from trencadis_testing.scheduling_machine import run_histories


class Urgent(SchedulingPolicy):
    preempts = True

    def order(self, view: SchedulerView) -> np.ndarray:
        return view.waiting[np.argsort(view.priority[view.waiting], kind="stable")]

    def preempt_for(self, view: SchedulerView, *, slot: int, candidates: np.ndarray) -> int:
        worst = int(candidates[np.argmax(view.priority[candidates])])
        return worst if view.priority[worst] > view.priority[slot] else -1


def histories(make=ServeInOrder, *, num_histories=15, num_rules=25) -> None:
    run_histories(make, may_refuse=False, num_histories=num_histories, num_rules=num_rules, machine=EngineMachine)


def keep_blocks_of_the_aborted(monkeypatch) -> None:
    release = BlockManager.release
    monkeypatch.setattr(
        BlockManager,
        "release",
        lambda self, blocks, **more: release(self, blocks[:-1] if len(blocks) > 6 else blocks, **more),
    )


def one_token_over_budget(monkeypatch) -> None:
    plan = Scheduler.next_plan

    def greedy(self, *args, **how):
        self._budget += 1
        return plan(self, *args, **how)

    monkeypatch.setattr(Scheduler, "next_plan", greedy)


def hit_of_the_whole_prompt(monkeypatch) -> None:
    def local_hit(self, sequence, blocks=None):
        most = len(sequence.tokens) // self.block_size
        self.hasher.extend(sequence.block_hashes, sequence.tokens, num_blocks=most, salt=sequence.request.cache_salt)
        return (blocks or self.blocks).longest_hit(sequence.block_hashes[:most]) if self.prefix_caching else []

    monkeypatch.setattr(EngineState, "local_hit", local_hit)


def victims_stay_scheduled(monkeypatch) -> None:
    allocate = Scheduler._allocate

    def careless(self, view, decodes, lengths):
        kept = allocate(self, view, decodes, lengths)
        return (decodes, lengths) if self._preempted else kept

    monkeypatch.setattr(Scheduler, "_allocate", careless)


def admits_beside_preempting(monkeypatch) -> None:
    room = Scheduler._make_room

    def forgetful(self, view, **how):
        made = room(self, view, **how)
        self._hidden = [*getattr(self, "_hidden", []), *self._preempted]
        self._preempted = []
        return made

    finish = Scheduler._finish_plan

    def remembers(self, *args):
        self._preempted, self._hidden = [*self._preempted, *getattr(self, "_hidden", [])], []
        return finish(self, *args)

    monkeypatch.setattr(Scheduler, "_make_room", forgetful)
    monkeypatch.setattr(Scheduler, "_finish_plan", remembers)


def forgets_a_request(monkeypatch) -> None:
    def add(self, request):
        return -1 if len(self._state.slot_of) > 4 else real(self, request)

    real = Engine.add
    monkeypatch.setattr(Engine, "add", add)


def tells_of_the_end_twice(monkeypatch) -> None:
    step = Engine.step

    def again(self):
        deltas = step(self)
        return attrs.evolve(deltas, finished=deltas.finished * 2)

    monkeypatch.setattr(Engine, "step", again)


def takes_what_can_never_fit(monkeypatch) -> None:
    monkeypatch.setattr(RequestValidator, "check", lambda self, request: None)


def starved_never_come_first(monkeypatch) -> None:
    """Newcomers first: who came first may wait for ever."""
    monkeypatch.setattr(Admission, "_aged", lambda self, view, order: order[1:] if len(order) > 1 else order[:0])


def schedules_who_gave_way(monkeypatch) -> None:
    preempt = Preemptor.preempt

    def forgets(self, view, order):
        preempt(self, view, order)
        return []

    monkeypatch.setattr(Preemptor, "preempt", forgets)


def prompts_run_twice_in_a_step(monkeypatch) -> None:
    continue_prefills = Scheduler._continue_prefills

    def twice(self, view, prefills, token_budget, slots, counts):
        continue_prefills(self, view, prefills, token_budget, slots, counts)
        slots += slots[1:]
        counts += counts[1:]

    monkeypatch.setattr(Scheduler, "_continue_prefills", twice)


def a_chunk_skips_a_token(monkeypatch) -> None:
    plan = Scheduler.next_plan

    def skips(self, *args):
        made = plan(self, *args)
        if made is not None and not made.samples.all():
            self._state.table.num_computed_tokens[made.slots[~made.samples]] += 1
        return made

    monkeypatch.setattr(Scheduler, "next_plan", skips)


def samples_in_the_middle_of_a_prompt(monkeypatch) -> None:
    plan = Scheduler.next_plan

    def samples(self, *args):
        made = plan(self, *args)
        return made if made is None else attrs.evolve(made, samples=np.ones(len(made.slots), np.bool_))

    monkeypatch.setattr(Scheduler, "next_plan", samples)


def preempts_without_need(monkeypatch) -> None:
    allocate = Scheduler._allocate

    def greedy(self, view, decodes, lengths):
        if len(decodes) > 2:
            self._make_room(view)
            stays = np.isin(decodes, self._state.running)
            decodes, lengths = decodes[stays], lengths[stays]
        return allocate(self, view, decodes, lengths)

    monkeypatch.setattr(Scheduler, "_allocate", greedy)


def idles_now_and_then(monkeypatch) -> None:
    plan = Scheduler.next_plan

    def lazy(self, *args):
        self._calls = getattr(self, "_calls", 0) + 1
        return None if self._calls % 9 > 4 else plan(self, *args)

    monkeypatch.setattr(Scheduler, "next_plan", lazy)
    monkeypatch.setattr(Engine, "_watch_progress", lambda self, *args, **options: None)


def plans_in_a_pause(monkeypatch) -> None:
    monkeypatch.setattr(Engine, "is_paused", property(lambda self: False, lambda self, value: None), raising=False)


def equal_hashes_for_every_salt(monkeypatch) -> None:
    root = BlockHasher.root
    monkeypatch.setattr(BlockHasher, "root", lambda self, salt: root(self, ""))


def rejected_drafts_count_as_computed(monkeypatch) -> None:
    accept = Committer._keep_verified

    def careless(self, plan, output, emits):
        accepted = accept(self, plan, output, emits)
        drafted = plan.slots[emits & (plan.num_to_verify > 0)]
        table = self._state.table
        table.num_computed_tokens[drafted] = table.num_known_tokens[drafted]
        return accepted

    monkeypatch.setattr(Committer, "_keep_verified", careless)


def a_swapped_block_is_not_copied_back(monkeypatch) -> None:
    hand_over = Swapping.after_plan

    def loses(self, step):
        self._push(*(one.host[:1] for one in self._ins))
        self._ins = [attrs.evolve(one, device=one.device[1:], host=one.host[1:]) for one in self._ins]
        hand_over(self, step)

    monkeypatch.setattr(Swapping, "after_plan", loses)


def host_blocks_of_the_ended_stay_taken(monkeypatch) -> None:
    monkeypatch.setattr(Swapping, "forget", lambda self, sequence, claim: self._let_go(sequence))


def failed_loads_count_as_loaded(monkeypatch) -> None:
    end = WaitingLoad.end
    monkeypatch.setattr(WaitingLoad, "end", lambda self, state, *, num_valid_tokens=None: end(self, state))


def blocks_of_a_cancelled_load_are_free_at_once(monkeypatch) -> None:
    give_up = Transfers._give_up

    def hasty(self, transfer_id):
        give_up(self, transfer_id)
        self._free(transfer_id)

    monkeypatch.setattr(Transfers, "_give_up", hasty)


def runs_before_its_blocks_are_loaded(monkeypatch) -> None:
    load = Transfers.load

    def eager(self, waiting, found):
        load(self, waiting, found)
        self._hasty.append((self, found.transfer_id))

    plan = Scheduler.next_plan

    def ends_loads(self, *args, **more):
        for transfers, transfer_id in Transfers._hasty:
            if transfer_id in transfers._loads:
                transfers._loads.pop(transfer_id).end(self._state)
        Transfers._hasty.clear()
        return plan(self, *args, **more)

    monkeypatch.setattr(Transfers, "_hasty", [], raising=False)
    monkeypatch.setattr(Transfers, "load", eager)
    monkeypatch.setattr(Scheduler, "next_plan", ends_loads)


def ends_of_the_unknown(monkeypatch) -> None:
    abort = Engine.abort
    monkeypatch.setattr(Engine, "abort", lambda self, name: abort(self, name) or "gone already")


def first_token_after_the_end(monkeypatch) -> None:
    finish = EngineState.finish

    def late(self, *args, **more):
        end = finish(self, *args, **more)
        return attrs.evolve(end, first_token_s=end.finish_s + 1.0)

    monkeypatch.setattr(EngineState, "finish", late)


@pytest.mark.representatives(1, ci=2)
@pytest.mark.parametrize("make", [ServeInOrder, Urgent, Priority, FairShare])
def test_any_history_keeps_the_invariants(make) -> None:
    histories(make)


FAULTS_BY_NUMBER = [
    (prompts_run_twice_in_a_step, "4: |8: "),
    (a_chunk_skips_a_token, "7: "),
    (samples_in_the_middle_of_a_prompt, "6, 8: "),
    (preempts_without_need, "14: "),
    (idles_now_and_then, "19: "),
    (plans_in_a_pause, "35: "),
    (equal_hashes_for_every_salt, "30: "),
    (rejected_drafts_count_as_computed, "29: "),
    (a_swapped_block_is_not_copied_back, "27: "),
    (host_blocks_of_the_ended_stay_taken, "13: "),
    (failed_loads_count_as_loaded, "27: "),
    (blocks_of_a_cancelled_load_are_free_at_once, "9: |11: |27: "),
    (runs_before_its_blocks_are_loaded, "27: "),
    (ends_of_the_unknown, "32: "),
    (first_token_after_the_end, "33: "),
]


RARE = {
    equal_hashes_for_every_salt,
    host_blocks_of_the_ended_stay_taken,
    failed_loads_count_as_loaded,
    blocks_of_a_cancelled_load_are_free_at_once,
    runs_before_its_blocks_are_loaded,
    takes_what_can_never_fit,
}
"""Faults that need many histories to be met, and seconds."""


def tiers(*cases):
    return [pytest.param(*case, marks=pytest.mark.slow if case[0] in RARE else ()) for case in cases]


@pytest.mark.representatives(1)
@pytest.mark.parametrize(
    ("fault", "number"), tiers(*FAULTS_BY_NUMBER), ids=lambda value: getattr(value, "__name__", "")
)
def test_a_fault_in_the_engine_is_found_by_the_invariant_that_it_breaks(monkeypatch, fault, number) -> None:
    fault(monkeypatch)
    with pytest.raises(Exception, match=number):
        histories(num_histories=60, num_rules=40)


FAULTS = [
    keep_blocks_of_the_aborted,
    one_token_over_budget,
    hit_of_the_whole_prompt,
    victims_stay_scheduled,
    admits_beside_preempting,
    forgets_a_request,
    tells_of_the_end_twice,
    takes_what_can_never_fit,
    starved_never_come_first,
]


@pytest.mark.parametrize("fault", tiers(*((fault,) for fault in FAULTS)), ids=lambda fault: fault.__name__)
def test_a_fault_in_the_engine_is_found(monkeypatch, fault) -> None:
    fault(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017, PT011 - an engine with a fault may break anywhere
        histories(num_histories=100 if fault in RARE else 15)


def test_who_gave_way_and_is_not_in_the_plan_is_missed(monkeypatch) -> None:
    schedules_who_gave_way(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017, PT011
        histories(Urgent)
