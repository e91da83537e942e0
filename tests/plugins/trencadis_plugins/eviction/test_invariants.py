"""What holds for every policy behind the real block manager, and what its calls cost."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from support.core.invariants import broken_invariants
from trencadis.clock import SimulatedClock
from trencadis.engine.cache.block_manager import BlockManager
from trencadis.engine.cache.guarded import GuardedEviction
from trencadis.interfaces import ComponentContext, EvictionPolicy
from trencadis.records import Request, SamplingParams
from trencadis_plugins.eviction import trencadis_eviction_policies
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fakes import FakeBackend, fake_text

COMPONENTS = {component.name: component for component in trencadis_eviction_policies()}
NUM_BLOCKS = 10

PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("run"), PROMPTS),
        st.tuples(st.just("end"), st.integers(0, 9)),
        st.tuples(st.just("swap"), st.integers(0, 9)),
        st.tuples(st.just("reset"), st.just(0)),
    ),
    max_size=50,
)


def make(name: str) -> EvictionPolicy:
    component = COMPONENTS[name]
    policy: EvictionPolicy = component.factory(component.config(), ComponentContext(clock=SimulatedClock(), seed=0))
    return policy


class House:
    """A block manager whose sequences hold the chain of their prompt."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.blocks = BlockManager(num_blocks=NUM_BLOCKS, eviction=GuardedEviction("policy", policy))
        self.running: list[list[int]] = []
        self.evicted: list[list[int]] = []
        self.now_s = 0.0

    def do(self, kind: str, what: object) -> None:
        self.now_s += 1.0
        if kind == "run":
            self.run(what)  # type: ignore[arg-type]
        elif kind == "end" and self.running:
            ended = self.running.pop(what % len(self.running))  # type: ignore[operator]
            self.blocks.release(np.array(ended, np.int32), now_s=self.now_s)
        elif kind == "swap":
            self.swap(what)  # type: ignore[arg-type]
        elif kind == "reset":
            self.blocks.reset_cache()
        self.check()

    def run(self, prompt: tuple[int, ...]) -> None:
        hashes = [bytes(prompt[: i + 1]) for i in range(len(prompt))]
        hit = self.blocks.longest_hit(hashes)
        if len(hashes) - len(hit) + self.blocks.num_unreferenced(hit) > self.blocks.num_available:
            return
        self.blocks.acquire(hit, now_s=self.now_s, salt="s")
        held = hit + self.blocks.allocate(len(hashes) - len(hit)).tolist()
        self.blocks.register_chain(held[len(hit) :], hashes, start=len(hit), salt="s", now_s=self.now_s)
        self.running.append(held)

    def swap(self, pick: int) -> None:
        used = sorted({block for held in self.running for block in held})[::-1]
        others = sorted(set(range(NUM_BLOCKS)) - set(used))
        pairs = dict(zip(used[: 1 + pick % 3], others, strict=False))
        if pairs:
            self.blocks.exchange(np.array(list(pairs), np.int32), np.array(list(pairs.values()), np.int32))
            self.running = [[pairs.get(block, block) for block in held] for held in self.running]

    def check(self) -> None:
        blocks = self.blocks
        held = np.bincount([block for held in self.running for block in held], minlength=NUM_BLOCKS)
        assert blocks.ref_counts.tolist() == held.tolist()
        assert blocks.num_free + blocks.num_cached + blocks.num_used == NUM_BLOCKS
        assert all(len(key) == 1 or key[:-1] in blocks._block_of for key in blocks._block_of), "chain order"
        assert set(blocks._successors) <= set(blocks._block_of)
        assert blocks._previous.keys() <= blocks._block_of.keys()
        self.evicted.append(sorted(blocks._cached))


@pytest.mark.representatives(3)
@settings(max_examples=40, phases=[Phase.explicit, Phase.generate], derandomize=True)
@given(moves=MOVES)
@pytest.mark.parametrize("name", COMPONENTS)
def test_no_block_is_lost_in_any_history_and_the_same_history_evicts_the_same(
    name: str, moves: list[tuple[str, object]]
) -> None:
    """A guard without a fallback raises on any victim that is no candidate."""
    house, other = House(make(name)), House(make(name))
    for kind, what in moves:
        house.do(kind, what)
        other.do(kind, what)
    assert house.evicted == other.evicted
    for ended in house.running:
        house.blocks.release(np.array(ended, np.int32), now_s=house.now_s)
    assert sorted(house.blocks.allocate(NUM_BLOCKS).tolist()) == list(range(NUM_BLOCKS))


@pytest.mark.representatives(3)
@pytest.mark.parametrize("name", COMPONENTS)
def test_engine_that_evicts_gives_the_same_text_and_finds_prefixes(name: str) -> None:
    policy = make(name)
    engine = make_engine(eviction=policy, num_blocks=14, backend=FakeBackend(max_model_len=48))
    for number in range(30):
        prompt = (*range(1, 10), *((number // 2 * 13 + i) % 97 for i in range(10)))
        params = SamplingParams(max_tokens=8)
        engine.add(Request(request_id=str(number), prompt_token_ids=prompt, params=params))
        assert drain(engine)[str(number)].token_ids.tolist() == fake_text(prompt, 8)
        assert broken_invariants(engine) == []
    assert engine.totals.num_prompt_tokens_cached > 100
    assert engine._state.blocks.eviction.strategy is policy


@pytest.mark.representatives(2)
@pytest.mark.parametrize("name", COMPONENTS)
def test_a_call_costs_hardly_more_with_sixty_times_the_candidates(name: str) -> None:
    """O(log n): a factor of two would be expected, O(n) gives sixty."""
    few, many = (min(_seconds(make(name), num_candidates) for _ in range(3)) for num_candidates in (500, 30_000))
    assert many < 12 * few


def _seconds(policy: EvictionPolicy, num_candidates: int) -> float:
    blocks = list(range(num_candidates))
    policy.on_use(blocks, keys=[b"%d" % block for block in blocks], depths=blocks, salt="", now_s=0.0)
    policy.on_free(blocks[::-1], depths=blocks[::-1], now_s=0.0)
    start_s = time.thread_time()
    for turn in range(100):
        (victim,) = policy.victims(1)
        key = b"again %d" % turn
        policy.on_use([victim], keys=[key], depths=[0], salt="", now_s=1.0)
        policy.on_free([victim], depths=[0], now_s=1.0)
        policy.on_hit([victim], now_s=1.0)
        policy.on_use([victim], keys=[key], depths=[0], salt="", now_s=1.0)
        policy.on_free([victim], depths=[0], now_s=1.0)
    return time.thread_time() - start_s
