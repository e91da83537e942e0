"""Under overload, urgent requests get in as long as less urgent ones run, and no request starves: on a clock of 10 ms a step."""

from __future__ import annotations

import random
from typing import Any

import pytest

from support.core.invariants import broken_invariants
from trencadis.clock import SimulatedClock
from trencadis.engine.engine import Engine
from trencadis.records import FinishedSequence, Request, SamplingParams
from trencadis_gallery.config import MultiLevelConfig
from trencadis_gallery.scheduling.multi_level import MultiLevel
from trencadis_plugins.scheduling.config import PriorityConfig
from trencadis_plugins.scheduling.priority import Priority
from trencadis_testing.engines import make_engine
from trencadis_testing.fakes import FakeBackend

STEP_S = 0.01


def request(name: str, length: int = 8, *, priority: int = 5, max_tokens: int = 200) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tuple((sum(map(ord, name)) + i) % 97 for i in range(length)),
        params=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        priority=priority,
    )


class Load:
    """An engine with two rows whose policy preempts, and what has ended there."""

    def __init__(self, *, age_s: float = 30.0, policy: Any = None, **options: Any) -> None:
        self.clock = SimulatedClock()
        self.engine: Engine = make_engine(
            policy=policy or Priority(PriorityConfig(preempt=True, age_s=age_s)),
            backend=FakeBackend(eos=-1, max_model_len=512),
            clock=self.clock,
            **{"max_num_seqs": 2, "num_blocks": 1000, "max_num_batched_tokens": 64, "max_wait_s": 1.0, **options},
        )
        self.max_wait_s: float = options.get("max_wait_s", 1.0)
        self.ends: dict[str, FinishedSequence] = {}

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.ends.update({end.request_id: end for end in self.engine.step().finished})
            self.clock.advance(STEP_S)

    def steps_to_end(self, name: str) -> int:
        for number in range(1, 1000):
            self.step()
            if name in self.ends:
                assert broken_invariants(self.engine) == []
                return number
        raise AssertionError(f"{name} never ends")

    @property
    def running(self) -> set[str]:
        table = self.engine._state.table
        return {table.sequence(slot).request.request_id for slot in self.engine._state.running.tolist()}


def test_room_that_was_made_for_a_request_is_kept_for_it_while_it_cannot_be_admitted_yet() -> None:
    """The step has no tokens left for it; with the next one, c, which waited too long, would take the row."""
    load = Load(max_num_batched_tokens=16)
    for name in "ab":
        load.engine.add(request(name))
    load.engine.add(request("c"))
    load.step(110)
    load.engine.add(request("long", 64, priority=1, max_tokens=5))
    load.step()  # in the place of a or b; its prompt takes all tokens of four steps
    assert "long" in load.running
    load.engine.add(request("urgent", priority=0, max_tokens=1))
    assert load.steps_to_end("urgent") <= 6
    assert load.ends["urgent"].num_preemptions == 0
    assert "c" not in load.running


def test_running_gets_nobody_older() -> None:
    """It has run for 100 s, and waited for none: an urgent one that has just come goes first at a second for a step of priority."""
    load = Load(age_s=1.0, max_num_seqs=1, max_wait_s=1e9)
    load.engine.add(request("long", max_tokens=400))
    for _ in range(100):
        load.step()
        load.clock.advance(1.0)
    load.engine.add(request("urgent", priority=0, max_tokens=2))
    assert load.steps_to_end("urgent") <= 3


def test_one_that_was_preempted_and_has_waited_too_long_runs_to_its_end() -> None:
    load = Load(max_num_seqs=1, max_wait_s=0.5, max_preemptions=1000)
    load.engine.add(request("long", max_tokens=100))
    for number in range(60):
        load.engine.add(request(f"urgent {number}", priority=0, max_tokens=8))
        load.step(9)
        if "long" in load.ends:
            break
    assert load.ends["long"].num_preemptions <= 4, "0.5 s of waits"


def test_waiting_still_protects_who_waited_long_enough() -> None:
    load = Load(age_s=0.2, max_num_seqs=1, max_wait_s=1e9)
    load.engine.add(request("first", priority=0, max_tokens=120))
    load.engine.add(request("patient", priority=5, max_tokens=20))
    load.steps_to_end("first")
    load.step(2)
    assert load.running == {"patient"}
    load.engine.add(request("urgent", priority=0, max_tokens=2))
    load.step(2)
    assert load.running == {"patient"}, "it has waited 1.2 s, and five steps of priority are worth one"


def test_starved_one_at_the_head_of_a_multi_level_queue_holds_nobody_up() -> None:
    policy = MultiLevel(MultiLevelConfig(preempt=True, quantum_tokens=16, starve_s=0.5))
    load = Load(policy=policy)
    for name in "abc":
        load.engine.add(request(name, 60))
    load.step(110)
    load.engine.add(request("short", 4, max_tokens=1))
    assert load.steps_to_end("short") <= 2


@pytest.mark.representatives(4)
@pytest.mark.parametrize("seed", range(12))
def test_urgent_ones_never_wait_for_less_urgent_ones_and_nobody_starves(seed: int) -> None:
    """Rows are what lacks, and the policy does not age.

    One step may give a free row to who waited too long; in the next, room is made for the most urgent.
    """
    rng = random.Random(seed)
    load = Load(
        age_s=0.0,
        max_num_seqs=rng.choice([1, 2, 4]),
        max_num_batched_tokens=rng.choice([8, 24, 64]),
        max_wait_s=rng.choice([0.05, 0.5]),
        max_preemptions=3,
        async_scheduling=rng.random() < 0.5,
    )
    state, table, num_added = load.engine._state, load.engine._state.table, 0
    passed_over = (-1, -1)  # epoch and step
    for step in range(4000):
        if step >= 400 and not load.engine.has_work:
            break
        if step < 400 and rng.random() < 0.2:
            priority, length = rng.choice([0, 1, 5, 5, 9]), rng.randint(1, 40)
            load.engine.add(request(f"r {num_added}", length, priority=priority, max_tokens=rng.randint(1, 40)))
            num_added += 1
        ready = [s for s in state.waiting.slots.tolist() if table.num_tokens[s] == table.num_known_tokens[s]]
        head = min(ready, key=lambda slot: (table.priority[slot], table.arrival_s[slot]), default=-1)
        epoch = int(table.epoch[head])
        load.step()
        if head < 0 or table.epoch[head] != epoch or not state.is_waiting(head):
            continue
        is_less_urgent = table.priority[state.running] > table.priority[head]
        times, waited_s = table.num_preemptions[state.running], table.waited_s[state.running]
        is_spared = (times >= 3) | ((times > 0) & (waited_s > load.max_wait_s))
        may_give_way = (is_less_urgent & ~is_spared).any()
        if may_give_way and not state.rows.num_free and head not in load.engine._scheduler.preemptor.has_room:
            assert passed_over != (epoch, step - 1), f"step {step}: slot {head} waits while less urgent ones run"
            passed_over = (epoch, step)
    assert len(load.ends) == num_added, "a request starves"
    assert broken_invariants(load.engine) == []
