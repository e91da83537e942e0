"""Drafts come last: they get what nobody else could use, and give it back. Decodes alone are planned a short way, to the same plans."""

from __future__ import annotations

from typing import Any

import pytest

from support.core.invariants import broken_invariants
from support.strategies.guesses import PROMPT, request, right, wrong
from trencadis.clock import SimulatedClock
from trencadis.interfaces import PendingStep
from trencadis.records import Batch
from trencadis_testing.doubles import ScriptedSpeculator
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fake_executor import FakeExecutor
from trencadis_testing.fakes import FakeBackend, fake_text


class Recorder(FakeExecutor):
    """Keeps of every batch the tokens of each row, and its drafts."""

    def __init__(self, backend: FakeBackend) -> None:
        super().__init__(backend)
        self.tokens: list[dict[int, int]] = []
        self.drafts: list[int] = []

    def submit(self, batch: Batch) -> PendingStep:
        self.tokens.append(
            {int(row): int(n) for one in batch.passes for row, n in zip(one.rows, one.query_lens, strict=True)}
        )
        self.drafts.append(0 if batch.drafts is None else int(batch.drafts.num_drafts.sum()))
        return super().submit(batch)


def recorded(draft: Any, **options: Any) -> tuple[Any, Recorder]:
    executor = Recorder(FakeBackend(eos=-1))
    speculator = None if draft is None else ScriptedSpeculator(draft)
    return make_engine(executor=executor, speculator=speculator, async_scheduling=False, **options), executor


@pytest.mark.parametrize("budget", [6, 8, 12])
def test_drafts_never_delay_a_prefill(budget: int) -> None:
    """A long prompt beside two decodes gets the very chunks that it gets without drafts, step by step."""

    def chunks(draft: Any) -> list[int]:
        engine, executor = recorded(draft, max_num_batched_tokens=budget)
        for name in "ab":
            engine.add(request(name, max_tokens=60))
        while len(executor.tokens) < 8:
            engine.step()
        first = len(executor.tokens)
        slot = engine.add(request("long", tuple(i % 97 for i in range(40)), max_tokens=2))
        found = []
        while slot in engine.inspect().by_slot:
            engine.step()
            found.append(executor.tokens[-1].get(2, 0))
        assert sum(found) >= 40
        assert len(found) == len(executor.tokens) - first
        return found

    assert chunks(wrong) == chunks(None)


@pytest.mark.parametrize("num_blocks", [7, 9, 12])
def test_drafts_preempt_nobody(num_blocks: int) -> None:
    """However short blocks are, as many sequences lose theirs as without drafts: wrong drafts change no plan but their own."""

    def served(draft: Any) -> tuple[int, int, list[list[int]]]:
        engine, _ = recorded(draft, num_blocks=num_blocks, max_num_seqs=3)
        for name in "abc":
            engine.add(request(name, PROMPT[: 4 + len(engine.inspect().sequences)]))
        texts = {}
        while engine.has_work:
            texts.update({end.request_id: end.token_ids.tolist() for end in engine.step().finished})
            assert broken_invariants(engine) == []
        return engine.totals.num_preempted, engine.totals.num_steps, [texts[name] for name in "abc"]

    assert served(wrong) == served(None)


def test_drafts_shrink_to_the_blocks_there_are() -> None:
    """Of four blocks three are in use and none is left: three more tokens fit the last one, so that two drafts do."""
    engine, executor = recorded(right, num_blocks=4, prefix_caching=False)
    engine.add(request("a", PROMPT[:8], max_tokens=8))
    text = []
    while engine.has_work:
        text += engine.step().token_ids.tolist()
    assert text == fake_text(PROMPT[:8], 8, eos=-1)
    assert max(executor.drafts) == 3
    assert engine.totals.num_preempted == 0


def test_blocks_that_only_rejected_drafts_needed_are_given_back() -> None:
    engine, _ = recorded(wrong, block_size=1, num_blocks=64, prefix_caching=False)
    engine.add(request("a"))
    blocks, table = engine._state.blocks, engine._state.table
    most = 0
    while engine.has_work:
        engine.step()
        if not engine.inspect().sequences:
            break
        slot = engine.inspect().sequences["a"].slot
        most = max(most, int(table.num_blocks[slot]) - int(table.num_tokens[slot]))
        engine._scheduler._take_back()
        assert table.num_blocks[slot] <= table.num_tokens[slot]
        assert blocks.num_used == table.num_blocks[slot]
        assert broken_invariants(engine) == []
    assert most == 2


def test_the_decode_share_of_a_policy_holds_for_drafts() -> None:
    from trencadis.interfaces import SchedulingPolicy, TokenSplit

    class TwoForDecodes(SchedulingPolicy):
        def split(self, view: Any, *, token_budget: int) -> TokenSplit:
            return TokenSplit(decode=2, prefill=token_budget)

    engine, executor = recorded(right, policy=TwoForDecodes(), max_num_batched_tokens=32)
    engine.add(request("a"))
    assert drain(engine)["a"].token_ids.tolist() == fake_text(PROMPT, 12, eos=-1)
    assert set(executor.drafts) == {0, 1}


def planned(num_blocks: int, preemption: str, *, the_long_way: bool) -> tuple[list[Any], list[Any], int]:
    """Return the plans of a crowd, what is told of each request, and how many plans of decodes alone were made the short way."""
    engine = make_engine(
        backend=FakeBackend(eos=-1, max_model_len=64, swaps_blocks=True),
        async_scheduling=False,
        clock=SimulatedClock(),
        max_num_seqs=3,
        num_blocks=num_blocks,
        preemption=preemption,
        swap_blocks=64,
    )
    scheduler, plans, short = engine._scheduler, [], 0
    if the_long_way:
        scheduler._plan_decodes = lambda *_: None
    plan_of = scheduler.next_plan

    def plan(*args: Any, **options: Any) -> Any:
        nonlocal short
        made = plan_of(*args, **options)
        if made is not None:
            columns = (made.slots, made.starts, made.num_scheduled, made.samples, made.admitted, made.preempted)
            plans.append((made.step, made.num_tokens, *(column.tolist() for column in columns)))
            short += made.slots is engine._state.running and len(engine._state.waiting) > 0
        return made

    scheduler.next_plan = plan
    for number in range(7):
        engine.add(request(f"r{number}", tuple(range(number, number + 5 + number)), max_tokens=12 + number))
    drain(engine)
    told = [engine.answer("explain", {"request_id": f"r{number}"})["requests"] for number in range(7)]
    return plans, told, short


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("num_blocks", [12, 60])
def test_what_waits_for_a_row_and_what_was_preempted_leave_the_short_way_to_the_same_plans(
    num_blocks: int, preemption: str
) -> None:
    plans, told, short = planned(num_blocks, preemption, the_long_way=False)
    others, told_of_others, none = planned(num_blocks, preemption, the_long_way=True)
    assert plans == others
    assert told == told_of_others
    assert short > 10 > none == 0
    assert any(preempted for *_, preempted in plans) is (num_blocks == 12)
