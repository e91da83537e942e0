from __future__ import annotations

import itertools

import numpy as np
import pytest

from trencadis.interfaces import TokenSplit
from trencadis.records import Request, SamplingParams
from trencadis_plugins.scheduling.config import PrefillFirstConfig
from trencadis_plugins.scheduling.prefill_first import PrefillFirst
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fake_executor import FakeExecutor
from trencadis_testing.fakes import FakeBackend
from trencadis_testing.scheduling import SchedulingConformance


class TestPrefillFirst(SchedulingConformance):
    make = PrefillFirst
    declares = frozenset({"arrival_order"})


class TestPrefillFirstWithDelayAndChunks(SchedulingConformance):
    num_histories = 8

    def make(self):
        return PrefillFirst(PrefillFirstConfig(delay_factor=0.5, chunked=True))


PROMPTS_ONLY, DECODES_ONLY = TokenSplit(0, 64), TokenSplit(64, 0)


@pytest.mark.parametrize(
    ("facts", "split"),
    [
        ({"waiting": [0], "running": [1]}, PROMPTS_ONLY),
        ({"running": [1]}, DECODES_ONLY),
        ({"waiting": [0], "running": [1], "num_free_rows": 0}, DECODES_ONLY),
        ({"waiting": [0], "running": [1], "num_free_blocks": 16}, DECODES_ONLY),
        ({"waiting": [0], "running": [1], "num_free_blocks": 17}, PROMPTS_ONLY),
        ({"waiting": [0], "num_free_blocks": 7}, PROMPTS_ONLY),
        ({"waiting": [0], "num_free_blocks": 6}, TokenSplit(64, 64)),
        ({"running": [1, 2], "num_computed_tokens": {1: 99, 2: 50}}, PROMPTS_ONLY),
    ],
)
def test_a_step_is_for_prompts_while_any_can_be_admitted_or_goes_on(view_of, facts, split):
    """100 tokens take 7 blocks of 16; with others running 1 % of 1,000 blocks stays free."""
    facts = {"num_computed_tokens": {1: 99}, **facts}
    assert PrefillFirst().split(view_of(**facts), token_budget=64) == split


def test_after_a_prompt_step_of_which_nothing_came_decodes_get_their_turn(view_of):
    policy, view = PrefillFirst(), view_of(waiting=[0], running=[1], num_computed_tokens={1: 99})
    assert [policy.split(view, token_budget=64) for _ in range(3)] == [PROMPTS_ONLY, DECODES_ONLY, PROMPTS_ONLY]


def test_prompts_wait_until_the_oldest_has_waited_for_a_share_of_the_last_prompt_step(view_of):
    """The prompt step from 0 to 2 s makes the next prompt wait 1 s."""
    policy = PrefillFirst(PrefillFirstConfig(delay_factor=0.5))
    facts = {"waiting": [0], "running": [1], "num_computed_tokens": {1: 99}, "arrival_s": {0: 1.5}}
    assert policy.split(view_of(waiting=[0], now_s=0.0), token_budget=64) == PROMPTS_ONLY
    assert policy.split(view_of(now_s=2.0, **facts), token_budget=64) == DECODES_ONLY
    assert policy.split(view_of(now_s=2.6, **facts), token_budget=64) == PROMPTS_ONLY


@pytest.mark.parametrize(
    ("chunked", "num_remaining", "token_budget", "chunk"),
    [
        (False, 50, 64, 50),
        (False, 50, 40, 0),
        (False, 200, 64, 64),
        (False, 200, 40, 0),
        (True, 50, 40, 40),
    ],
)
def test_only_a_prompt_longer_than_a_step_is_cut(view_of, chunked, num_remaining, token_budget, chunk):
    policy = PrefillFirst(PrefillFirstConfig(chunked=chunked))
    view = view_of(waiting=[0])
    policy.split(view, token_budget=64)
    assert policy.chunk(view, slot=0, num_remaining=num_remaining, token_budget=token_budget) == chunk


def test_prompts_and_decodes_never_share_a_step(request_of):
    lengths = []

    class Watch(FakeExecutor):
        def submit(self, batch):
            lengths.append([length for one in batch.passes for length in one.query_lens.tolist()])
            return super().submit(batch)

    engine = make_engine(
        policy=PrefillFirst(), executor=Watch(FakeBackend(eos=-1, max_model_len=256)), max_num_batched_tokens=40
    )
    for number in itertools.count():
        if number < 8:
            engine.add(request_of(str(number), 10 + number, prompt_token_ids=(number,) * (10 + number), max_tokens=6))
        elif not engine.has_work:
            break
        engine.step()
    assert not [step for step in lengths if min(step) == 1 < max(step)]
    assert any(max(step) == 1 for step in lengths)


@pytest.mark.parametrize("chunked", [False, True])
def test_while_a_sequence_is_swapped_no_new_prompt_is_admitted(view_of, chunked):
    """Slots 0 and 3 are new, 1 and 2 have 100 tokens each of which 99 and 40 are in host memory; 4 decodes."""
    policy = PrefillFirst(PrefillFirstConfig(chunked=chunked))
    view = view_of(
        waiting=[0, 1, 2, 3],
        running=[4],
        num_swapped=2,
        num_swapped_tokens={1: 99, 2: 40},
        num_blocks={4: 7},
        num_computed_tokens={4: 99},
    )
    assert policy.split(view, token_budget=64) == TokenSplit(decode=64, prefill=61)
    assert policy.order(view).tolist() == [1, 2, 0, 3]
    chunks = [policy.chunk(view, slot=slot, num_remaining=60, token_budget=50) for slot in (0, 1, 2, 3, 4)]
    assert chunks == [0, 50, 50, 0, 50]


def test_new_prompts_are_admitted_where_nothing_runs_and_no_swapped_sequence_could_come_back(view_of):
    policy, view = PrefillFirst(), view_of(waiting=[1, 2], num_swapped=1, num_swapped_tokens={1: 99})
    policy.split(view, token_budget=100)
    assert policy.chunk(view, slot=2, num_remaining=100, token_budget=100) == 0
    policy.split(view, token_budget=100)  # nothing of it ran
    assert policy.chunk(view, slot=2, num_remaining=100, token_budget=100) == 100
    policy.split(view, token_budget=100)
    assert policy.chunk(view, slot=2, num_remaining=100, token_budget=100) == 0


def test_when_nobody_is_swapped_any_more_prompts_come_again(view_of):
    policy = PrefillFirst()
    policy.split(view_of(waiting=[1], num_swapped=1, num_swapped_tokens={1: 99}), token_budget=64)
    after = view_of(waiting=[0], running=[1], num_computed_tokens={1: 99})
    assert policy.split(after, token_budget=64) == PROMPTS_ONLY
    assert policy.chunk(after, slot=0, num_remaining=60, token_budget=64) == 60


@pytest.mark.parametrize("overlap", [False, True])
def test_a_whole_engine_admits_no_new_prompt_while_one_is_swapped(overlap):
    engine = make_engine(
        policy=PrefillFirst(),
        backend=FakeBackend(eos=-1, max_model_len=80),
        preemption="swap",
        num_blocks=20,
        max_num_seqs=8,
        async_scheduling=overlap,
    )
    state, plan_of = engine._state, engine._scheduler.next_plan
    admitted_beside: list[bool] = []

    def plan(*args, **kwargs):
        swapped = set(np.flatnonzero(state.table.num_swapped_tokens).tolist())
        made = plan_of(*args, **kwargs)
        if made is not None and made.admitted.size and swapped:
            admitted_beside.append(set(made.admitted.tolist()) <= swapped)
        return made

    engine._scheduler.next_plan = plan
    for name in "abcdefgh":
        params = SamplingParams(max_tokens=30, temperature=0.0)
        prompt = tuple((ord(name) + i) % 97 for i in range(8))
        engine.add(Request(request_id=name, prompt_token_ids=prompt, params=params))
        engine.step()
    ends = drain(engine)
    assert len(ends) == 8
    assert engine.totals.num_recomputed_tokens == 0
    assert admitted_beside
    assert all(admitted_beside)
