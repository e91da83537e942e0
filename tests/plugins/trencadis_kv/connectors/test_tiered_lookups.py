from __future__ import annotations

import pytest

from support.kv.tiered_children import ScriptedScheduler
from trencadis.clock import SimulatedClock
from trencadis.records import Request
from trencadis_kv.connectors.tiered.child import Child, TierCounters
from trencadis_kv.connectors.tiered.scheduler import TierLookups
from trencadis_kv.store.breaker import Breaker


class Scene:
    def __init__(self, *sides):
        self.clock, self.counters, self.sides = SimulatedClock(), TierCounters(), sides
        children = [
            Child(
                str(i),
                side,
                breaker=Breaker(self.clock, name=str(i), failure_limit=2, failure_window_s=30, cooldown_s=5),
                counters=self.counters,
                probe_s=1.0,
            )
            for i, side in enumerate(sides)
        ]
        self.lookups = TierLookups(children, clock=self.clock, timeout_s=1.0)

    def ask(self, name="r", *, num_local_tokens=0, last=b"3", without=()):
        hits = self.lookups.find(
            Request(request_id=name, prompt_token_ids=(1,)),
            block_hashes=[b"1", b"2", last],
            num_local_tokens=num_local_tokens,
            num_tokens=12,
            without=without,
        )
        return None if hits is None else [(child, found.num_tokens) for child, found in hits]

    def num_asked(self, child):
        return sum(call[0] == "lookup" for call in self.sides[child].told)


def test_all_that_have_more_than_the_local_hit_are_returned_in_order():
    scene = Scene(ScriptedScheduler(num_tokens=4), ScriptedScheduler(num_tokens=8), ScriptedScheduler(num_tokens=6))
    assert scene.ask(num_local_tokens=4) == [(1, 8), (2, 6)]


def test_one_that_has_everything_is_not_waited_beyond():
    scene = Scene(ScriptedScheduler(num_tokens=12), ScriptedScheduler(pending=True))
    assert scene.ask() == [(0, 12)]
    assert scene.num_asked(1) == 0


def test_a_nearer_one_is_waited_for_even_if_a_farther_one_has_everything():
    near = ScriptedScheduler(pending=True)
    scene = Scene(near, ScriptedScheduler(num_tokens=12))
    assert scene.ask() is None
    near.pending, near.num_tokens = False, 12
    assert scene.ask() == [(0, 12), (1, 12)]


def test_an_answer_is_asked_for_once():
    slow = ScriptedScheduler(pending=True)
    scene = Scene(ScriptedScheduler(num_tokens=4), slow)
    assert [scene.ask(), scene.ask()] == [None, None]
    slow.pending = False
    assert scene.ask() == [(0, 4)]
    assert (scene.num_asked(0), scene.num_asked(1)) == (1, 3)


def test_answers_to_another_request_of_the_same_name_are_of_no_use():
    """Requests come and go, and names come again."""
    fast = ScriptedScheduler(num_tokens=4)
    scene = Scene(fast, ScriptedScheduler(pending=True))
    assert scene.ask() is None
    assert scene.ask(last=b"4") is None
    assert [call for call in fast.told if call[0] == "on_unused"] == [("on_unused", 0)]
    assert scene.num_asked(0) == 2


def test_one_that_never_answers_is_left_out_after_the_timeout():
    scene = Scene(ScriptedScheduler(pending=True), ScriptedScheduler(num_tokens=8))
    assert scene.ask() is None
    scene.clock.advance(0.9)
    assert scene.ask() is None
    scene.clock.advance(0.2)
    assert scene.ask() == [(1, 8)]
    assert scene.counters.value("lookups_total", tier="0", result="timeout") == 1


def test_one_that_keeps_not_answering_is_not_asked_any_more():
    scene = Scene(ScriptedScheduler(pending=True), ScriptedScheduler(num_tokens=8))
    for name in ("a", "b"):
        scene.ask(name)
        scene.clock.advance(1.1)
        scene.ask(name)
    assert scene.ask("c") == [(1, 8)], "it is waited for although it failed twice"


def test_those_to_be_avoided_are_not_asked():
    scene = Scene(ScriptedScheduler(num_tokens=12), ScriptedScheduler(num_tokens=8))
    assert scene.ask(without={0}) == [(1, 8)]
    assert scene.num_asked(0) == 0


@pytest.mark.parametrize("other", [{"last": b"4"}, {}])
def test_answers_to_an_earlier_request_of_the_name_are_not_used(other):
    """The first was aborted while it waited; its prompt was another one, or it was long ago."""
    first = ScriptedScheduler(num_tokens=8)
    scene = Scene(first, ScriptedScheduler(pending=True))
    assert scene.ask() is None
    first.num_tokens = 0
    if not other:
        scene.clock.advance(10.0)
    assert scene.ask(**other) is None
    scene.clock.advance(1.1)
    assert scene.ask(**other) == []
