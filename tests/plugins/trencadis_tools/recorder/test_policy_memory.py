from __future__ import annotations

import itertools
import random
from collections import OrderedDict, deque

import attrs
import msgspec
import numpy as np
import pytest

from trencadis.interfaces import EvictionPolicy, SchedulingPolicy
from trencadis.interfaces.plain_state import plain_state
from trencadis_plugins.scheduling.fair_share import FairShare
from trencadis_plugins.scheduling.prefix_affinity import PrefixAffinity
from trencadis_tools.recorder.flight_record import _decode, _encode
from trencadis_tools.recorder.policy_memory import PolicyMemory


@attrs.frozen
class Settings:
    """A configuration."""

    secret: str = "pepper"


class Part:
    __slots__ = ("count", "table")

    def __init__(self):
        self.count = 0
        self.table = {1: [2, 3]}


@plain_state
class Everything(SchedulingPolicy):
    def __init__(self):
        self.number, self.text, self.nothing, self.keys = 1.5, "x", None, [b"one", b"", b"two", b"one"]
        self.array = np.arange(4)
        self.heap = [(0.5, 1, 2), (1.5, 2, 3)]
        self.sets = {3, 4}, frozenset({5})
        self.ordered = OrderedDict([(b"one", 1), (b"two", 2)])
        self.queue = deque([1, 2, 3], maxlen=3)
        self.numbers = itertools.count(7)
        self.draws, self.generator = random.Random(3), np.random.default_rng(4)
        self.part, self.settings = Part(), Settings()
        self.function = len


def carried(policy, fresh):
    """Let a fresh policy remember what another one does, over a file."""
    memory = PolicyMemory(policy)
    assert not memory.obstacle
    numbers = {}
    encoded = memory.encoded(lambda one: numbers.setdefault(one, len(numbers)))
    names = {number: one for one, number in numbers.items()}
    data = msgspec.msgpack.encode(encoded, enc_hook=_encode)
    PolicyMemory.restore(fresh, msgspec.msgpack.decode(data, ext_hook=_decode), names.__getitem__)
    return data


def test_every_kind_of_value_is_carried():
    policy, fresh = Everything(), Everything()
    policy.number, policy.array, policy.part.count = -2.0, np.array([9.5]), 11
    policy.heap.append((9.0, 9, 9))
    policy.part.table[4] = [5]
    next(policy.numbers), policy.draws.random(), policy.generator.random()
    data = carried(policy, fresh)
    for name in ("number", "text", "nothing", "keys", "heap", "sets", "ordered", "queue"):
        assert getattr(fresh, name) == getattr(policy, name)
    assert list(fresh.ordered) == list(policy.ordered)
    assert fresh.queue.maxlen == 3
    assert fresh.array.tolist() == [9.5]
    assert (fresh.part.count, fresh.part.table) == (11, {1: [2, 3], 4: [5]})
    assert next(fresh.numbers) == next(policy.numbers)
    assert fresh.draws.random() == policy.draws.random()
    assert fresh.generator.random() == policy.generator.random()
    assert b"pepper" not in data


def test_the_copy_does_not_change_with_the_policy():
    policy, fresh = Everything(), Everything()
    memory = PolicyMemory(policy)
    policy.heap.clear(), policy.part.table.clear(), policy.ordered.clear(), next(policy.numbers)
    policy.array[:] = 0
    PolicyMemory.restore(fresh, memory.encoded(lambda one: 0), lambda number: b"one")
    assert fresh.heap == [(0.5, 1, 2), (1.5, 2, 3)]
    assert fresh.part.table == {1: [2, 3]}
    assert fresh.array.tolist() == [0, 1, 2, 3]
    assert next(fresh.numbers) == 7


class Undeclared(SchedulingPolicy):
    """Declares nothing."""


class Inherits(Everything):
    """Has what its base class declares, and perhaps more."""


@plain_state
class Holds(EvictionPolicy):
    def __init__(self):
        self.parts = [Part()]

    def on_free(self, blocks, *, depths, now_s): ...

    def on_hit(self, blocks, *, now_s): ...

    def victims(self, num_blocks):
        return []

    def forget(self, blocks): ...


@pytest.mark.parametrize(
    ("policy", "cause"),
    [
        (Undeclared(), "Undeclared does not declare what it remembers"),
        (Inherits(), "Inherits does not declare"),
        (PrefixAffinity(), "PrefixAffinity does not declare"),
        (FairShare(inner=PrefixAffinity()), "PrefixAffinity does not declare"),
        (Holds(), "Holds.parts holds Part, which is not copied"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_what_is_not_declared_is_not_copied(policy, cause):
    memory = PolicyMemory(policy)
    assert cause in memory.obstacle
    assert memory.encoded(lambda one: 0) == {}
