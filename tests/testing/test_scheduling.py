"""The scheduling suite passes what keeps the contract and fails every planted fault."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from trencadis.interfaces import SchedulerView, SchedulingPolicy, TokenSplit
from trencadis.records import Request
from trencadis_testing.engines import ServeInOrder
from trencadis_testing.scheduling import SchedulingConformance


class TestServeInOrder(SchedulingConformance):
    make = ServeInOrder


class ShortestFirst(SchedulingPolicy):
    def order(self, view: SchedulerView):
        return view.waiting[np.argsort(view.num_tokens[view.waiting], kind="stable")]

    def victim(self, view: SchedulerView, *, candidates):
        return int(candidates[np.argmax(view.num_blocks[candidates])])


class TestShortestFirst(SchedulingConformance):
    make = ShortestFirst


class DropsOne(SchedulingPolicy):
    def order(self, view: SchedulerView):
        return view.waiting[1:]


class DoublesOne(SchedulingPolicy):
    def order(self, view: SchedulerView):
        return np.append(view.waiting, view.waiting[:1])


class GlobalDice(SchedulingPolicy):
    _calls = itertools.count()

    def order(self, view: SchedulerView):
        order = view.waiting.tolist()
        random.Random(next(self._calls)).shuffle(order)
        return np.array(order, np.int32)


class NeverPrefills(SchedulingPolicy):
    def chunk(self, view: SchedulerView, *, slot: int, num_remaining: int, token_budget: int) -> int:
        return 0


class NeverDecodes(SchedulingPolicy):
    def split(self, view: SchedulerView, *, token_budget: int) -> TokenSplit:
        return TokenSplit(0, token_budget)


class OverBudget(SchedulingPolicy):
    def chunk(self, view: SchedulerView, *, slot: int, num_remaining: int, token_budget: int) -> int:
        return num_remaining


class WrongVictim(SchedulingPolicy):
    def victim(self, view: SchedulerView, *, candidates):
        return int(view.waiting[0]) if view.waiting.size else -1


class ChangesTheView(SchedulingPolicy):
    def order(self, view: SchedulerView):
        view.priority[view.waiting] = 0
        return view.waiting


class SortsInPlace(SchedulingPolicy):
    def order(self, view: SchedulerView):
        view.waiting.sort()
        return view.waiting


class RefusesQuietly(SchedulingPolicy):
    def admit(self, request: Request, *, num_waiting: int, num_waiting_tokens: int) -> str:
        return "full" if num_waiting > 2 else ""


class ForgetsReusedSlots(SchedulingPolicy):
    """Remembers slots it has seen and puts them last for good: breaks when a slot is reused."""

    def __init__(self) -> None:
        self.tickets: dict[int, int] = {}

    def order(self, view: SchedulerView):
        for slot in view.waiting.tolist():
            if slot in self.tickets and view.num_preemptions[slot] == 0 and self.tickets[slot] != id(view):
                raise RuntimeError("this slot ended long ago")
            self.tickets[slot] = id(view)
        return view.waiting


@pytest.mark.parametrize(
    "mutant",
    [
        DropsOne,
        DoublesOne,
        GlobalDice,
        NeverPrefills,
        NeverDecodes,
        OverBudget,
        WrongVictim,
        ChangesTheView,
        SortsInPlace,
        RefusesQuietly,
        ForgetsReusedSlots,
    ],
)
def test_planted_fault_is_found(failures_of, mutant) -> None:
    assert failures_of(SchedulingConformance, mutant)
