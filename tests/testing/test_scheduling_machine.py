"""Random histories find faults planted in the engine itself, under a policy that has none."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from trencadis.engine.admission import Admission
from trencadis.engine.block_manager import BlockManager
from trencadis.engine.engine import Engine
from trencadis.engine.giving_way import GivingWay
from trencadis.engine.scheduler import Scheduler
from trencadis.engine.state import EngineState
from trencadis.interfaces import SchedulerView, SchedulingPolicy
from trencadis_testing.engines import ServeInOrder
from trencadis_testing.scheduling_machine import run_histories


class Urgent(SchedulingPolicy):
    preempts = True

    def order(self, view: SchedulerView) -> np.ndarray:
        return view.waiting[np.argsort(view.priority[view.waiting], kind="stable")]

    def give_way(self, view: SchedulerView, *, slot: int, candidates: np.ndarray) -> int:
        worst = int(candidates[np.argmax(view.priority[candidates])])
        return worst if view.priority[worst] > view.priority[slot] else -1


def histories(make=ServeInOrder) -> None:
    run_histories(make, may_refuse=False, num_histories=15, num_rules=25)


@pytest.mark.parametrize("make", [ServeInOrder, Urgent])
def test_the_engine_as_it_is_passes(make) -> None:
    histories(make)


def keep_blocks_of_the_aborted(monkeypatch) -> None:
    release = BlockManager.release
    monkeypatch.setattr(
        BlockManager,
        "release",
        lambda self, blocks, **more: release(self, blocks[:-1] if len(blocks) > 6 else blocks, **more),
    )


def one_token_over_budget(monkeypatch) -> None:
    plan = Scheduler.plan

    def greedy(self, *args):
        self._budget += 1
        return plan(self, *args)

    monkeypatch.setattr(Scheduler, "plan", greedy)


def hit_of_the_whole_prompt(monkeypatch) -> None:
    def local_hit(self, sequence):
        most = len(sequence.tokens) // self.block_size
        self.hasher.extend(sequence.block_hashes, sequence.tokens, num_blocks=most, salt=sequence.request.cache_salt)
        return self.blocks.longest_hit(sequence.block_hashes[:most]) if self.prefix_caching else []

    monkeypatch.setattr(EngineState, "local_hit", local_hit)


def victims_stay_scheduled(monkeypatch) -> None:
    allocate = Scheduler._allocate

    def careless(self, view, decodes, lengths):
        kept = allocate(self, view, decodes, lengths)
        return (decodes, lengths) if self._preempted else kept

    monkeypatch.setattr(Scheduler, "_allocate", careless)


def admits_beside_preempting(monkeypatch) -> None:
    room = Scheduler._make_room

    def forgetful(self, view):
        made = room(self, view)
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
    monkeypatch.setattr(Engine, "_check", lambda self, request: None)


def starved_never_come_first(monkeypatch) -> None:
    """Newcomers first: who came first may wait for ever."""
    monkeypatch.setattr(Admission, "_aged", lambda self, view, order: order[1:] if len(order) > 1 else order[:0])


def schedules_who_gave_way(monkeypatch) -> None:
    make_way = GivingWay.make_way

    def forgets(self, view, order):
        make_way(self, view, order)
        return []

    monkeypatch.setattr(GivingWay, "make_way", forgets)


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


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_in_the_engine_is_found(monkeypatch, fault) -> None:
    fault(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017, PT011 - an engine with a fault may break anywhere
        histories()


def test_who_gave_way_and_is_not_in_the_plan_is_missed(monkeypatch) -> None:
    schedules_who_gave_way(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017, PT011
        histories(Urgent)
