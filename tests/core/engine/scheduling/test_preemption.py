from __future__ import annotations

import numpy as np
import pytest

from support.core.invariants import broken_invariants
from trencadis.interfaces import SchedulerView, SchedulingPolicy
from trencadis.records import Request, SamplingParams
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fakes import FakeBackend, fake_text


class YoungestGivesWay(SchedulingPolicy):
    """Orders by priority; whoever waits with number 0 pushes out the youngest of another number."""

    preempts = True

    def __init__(self) -> None:
        self.asked: list[tuple[int, list[int]]] = []

    def order(self, view: SchedulerView) -> np.ndarray:
        return view.waiting[np.argsort(view.priority[view.waiting], kind="stable")]

    def preempt_for(self, view: SchedulerView, *, slot: int, candidates: np.ndarray) -> int:
        self.asked.append((slot, candidates.tolist()))
        others = candidates[view.priority[candidates] > 0]
        return int(others[-1]) if len(others) and view.priority[slot] == 0 else -1


def request(name: str, length: int = 8, *, priority: int = 5, max_tokens: int = 30) -> Request:
    first = sum(map(ord, name)) % 50
    return Request(
        request_id=name,
        prompt_token_ids=tuple((first + i) % 97 for i in range(length)),
        params=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        priority=priority,
    )


def engine_of(policy: SchedulingPolicy, **sizes: object):
    return make_engine(policy=policy, backend=FakeBackend(eos=-1, max_model_len=240), **{"max_num_seqs": 3, **sizes})


def running(engine) -> set[str]:
    return {engine._state.table.sequence(slot).request.request_id for slot in engine._state.running.tolist()}


@pytest.mark.parametrize("overlap", [False, True])
def test_the_waiting_one_runs_in_the_very_step_and_the_other_comes_back(overlap: bool) -> None:
    engine = engine_of(YoungestGivesWay(), async_scheduling=overlap)
    for name in "abc":
        engine.add(request(name))
    for _ in range(4):
        engine.step()
    engine.add(request("urgent", priority=0, max_tokens=3))
    engine.step()
    assert running(engine) == {"a", "b", "urgent"}
    assert broken_invariants(engine) == []
    ends = drain(engine)
    assert {name: end.num_preemptions for name, end in ends.items()} == {"a": 0, "b": 0, "c": 1, "urgent": 0}
    for name in "abc":
        assert ends[name].token_ids.tolist() == fake_text(request(name).prompt_token_ids, 30, eos=-1)


def test_with_a_row_and_blocks_free_nobody_is_asked() -> None:
    policy = YoungestGivesWay()
    engine = engine_of(policy, max_num_seqs=4)
    for name in "abc":
        engine.add(request(name))
    engine.step()
    engine.add(request("urgent", priority=0))
    drain(engine)
    assert policy.asked == []


def test_as_many_give_way_as_it_takes() -> None:
    """The urgent prompt needs 15 of 24 blocks; three sequences hold 5 each."""
    engine = engine_of(YoungestGivesWay(), max_num_seqs=8, num_blocks=24)
    for name in "abc":
        engine.add(request(name, 17, max_tokens=3))
    engine.step()
    engine.add(request("urgent", 57, priority=0, max_tokens=3))
    ends = drain(engine)
    assert {name: end.num_preemptions for name, end in ends.items()} == {"a": 0, "b": 1, "c": 1, "urgent": 0}


def test_nobody_gives_way_in_vain() -> None:
    """Two of the three may give way, and their blocks are not enough: all three go on."""

    class OnlyOnce(YoungestGivesWay):
        def preempt_for(self, view: SchedulerView, *, slot: int, candidates: np.ndarray) -> int:
            return super().preempt_for(view, slot=slot, candidates=candidates) if len(candidates) > 1 else -1

    engine = engine_of(OnlyOnce(), max_num_seqs=8, num_blocks=24)
    for name in "abc":
        engine.add(request(name, 17, max_tokens=3))
    engine.step()
    engine.add(request("urgent", 93, priority=0, max_tokens=2))
    ends = drain(engine)
    assert sum(end.num_preemptions for end in ends.values()) == 0
    assert len(ends) == 4


def test_who_gave_way_as_often_as_allowed_stays() -> None:
    policy = YoungestGivesWay()
    engine = engine_of(policy, max_num_seqs=1, max_preemptions=2)
    engine.add(request("unimportant", max_tokens=60))
    for number in range(5):
        engine.step()
        engine.step()
        engine.add(request(f"urgent {number}", priority=0, max_tokens=1))
    assert drain(engine)["unimportant"].num_preemptions == 2


def test_a_policy_that_does_not_say_so_is_never_asked() -> None:
    class Silent(YoungestGivesWay):
        preempts = False

    policy = Silent()
    engine = engine_of(policy, max_num_seqs=1)
    engine.add(request("a"))
    engine.step()
    engine.add(request("urgent", priority=0))
    assert all(end.num_preemptions == 0 for end in drain(engine).values())
    assert policy.asked == []


def test_a_policy_is_told_of_every_request_before_it_is_asked_about_it() -> None:
    class Listens(SchedulingPolicy):
        def __init__(self) -> None:
            self.known: dict[int, str] = {}

        def on_added(self, *, slot: int, request: Request) -> None:
            assert slot not in self.known
            self.known[slot] = request.request_id

        def order(self, view: SchedulerView) -> np.ndarray:
            assert set(view.waiting.tolist()) <= set(self.known)
            return view.waiting

        def on_finished(self, *, slot: int, tenant: int, num_output_tokens: int) -> None:
            del self.known[slot]

    policy = Listens()
    engine = engine_of(policy)
    for number in range(12):
        engine.add(request(str(number), max_tokens=3))
        engine.step()
    drain(engine)
    assert policy.known == {}
