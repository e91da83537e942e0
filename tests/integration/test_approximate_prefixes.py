"""Approximate KV in whole engines: those who ask get it, and nobody else ever does. The states of the fake model tell which is which."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from support.core.invariants import broken_invariants
from support.kv.fake_blender import NEARLY_ALL, OTHER, BlendingBackend
from trencadis.clock import SimulatedClock
from trencadis.interfaces import ComponentContext
from trencadis.records import Request, SamplingParams
from trencadis_kv.connectors.blend.config import BlendConfig
from trencadis_kv.connectors.blend.connector import make_blend
from trencadis_kv.interfaces import KVPolicy
from trencadis_plugins.eviction.lru import Lru
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fake_model import START, chain, fake_next_token
from trencadis_testing.fakes import fake_text

BLOCK = 4


class Always(KVPolicy):
    """Whatever is there is used."""


def document(seed: int, length: int = 20) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(1, 97) for _ in range(length))


A, B, C = document(1), document(2), document(3)


class Kitchen:
    """An engine with the connector, one request after the other."""

    def __init__(self, **options) -> None:
        self.clock = SimulatedClock()
        parts = {"eviction": Lru, "kv_policy": Always}

        def make(noun, name):
            return parts[noun]() if noun in parts else ComponentContext(clock=self.clock, seed=0).make(noun, name)

        config = BlendConfig(min_chunk_tokens=8, chunk_tokens=16)
        self.pair = make_blend(config, ComponentContext(clock=self.clock, seed=0, make=make))
        self.backend = BlendingBackend(block_size=BLOCK, max_model_len=400)
        options = {"num_blocks": 120, "max_num_batched_tokens": 64, "warmup": False, "block_size": BLOCK, **options}
        self.engine = make_engine(connector=self.pair, backend=self.backend, clock=self.clock, **options)
        self.count = 0

    def add(self, prompt, *, ratio=None, tenant="", max_tokens=6, **terms):
        self.count += 1
        name = f"r{self.count}"
        params = {} if ratio is None else {"transfer_params": {"blend": True, "blend_ratio": ratio}}
        terms |= {"tenant": tenant, "params": SamplingParams(max_tokens=max_tokens, ignore_eos=True), **params}
        self.engine.add(Request(request_id=name, prompt_token_ids=tuple(prompt), **terms))
        return name

    def step(self):
        deltas = self.engine.step()
        self.pair.worker.wait_idle(60.0)
        assert broken_invariants(self.engine) == []
        return deltas

    def serve(self, prompt, **terms):
        name = self.add(prompt, **terms)
        for _ in range(200):
            for end in self.step().finished:
                if end.request_id == name:
                    return end
        raise AssertionError(f"{name} does not end")

    def learn(self, *, tenant=""):
        """Serve the documents exactly; content is offered at a commit and taken with the next step."""
        for prompt in ((*A, *B, *C, 1), (90, 91), (90, 91)):
            self.serve(prompt, tenant=tenant)

    def sequence(self, name):
        state = self.engine._state
        return state.table.sequence(state.slot_of[name])

    def running(self, name):
        """Step until a request runs, and return its sequence."""
        state = self.engine._state
        while name not in state.slot_of or not state.running.size:
            self.step()
        return self.sequence(name)


@pytest.fixture
def kitchen():
    made = Kitchen()
    made.learn()
    return made


def exact(end, prompt):
    return end.token_ids.tolist() == fake_text(prompt, len(end.token_ids), eos=-1)


PROMPT = (*C, *A, *B, 7, 8, 9)


def fake_text_from_other_states(prompt, count):
    """Return what follows a prompt whose chunks end in an approximate state, as the fake makes it."""
    end = len(prompt) // BLOCK * BLOCK - (0 if len(prompt) % BLOCK else BLOCK)
    end = min(end, 60)  # the chunks reach no further
    state = START
    for position, token in enumerate(prompt):
        if position == end:
            state ^= OTHER
        state = chain(state, token, position)
    tokens = []
    for position in range(len(prompt), len(prompt) + count):
        tokens.append(fake_next_token(state, 97))
        state = chain(state, tokens[-1], position)
    return tokens


@pytest.mark.representatives(3)
@pytest.mark.parametrize(
    ("ratio", "is_blended", "is_exact"),
    # The fake's approximate states give other tokens, and a share of all tokens is computed without blending.
    [(0.2, True, False), (NEARLY_ALL, True, True), (1.0, False, True)],
)
def test_chunks_in_another_order_are_found_and_the_answer_says_so(kitchen, ratio, is_blended, is_exact):
    end = kitchen.serve(PROMPT, ratio=ratio)
    assert (end.num_approximate_tokens > 40) is is_blended
    assert end.num_approximate_tokens in (0, end.num_cached_tokens)
    assert exact(end, PROMPT) is is_exact


def test_blended_blocks_never_enter_the_exact_cache(kitchen):
    assert kitchen.serve(PROMPT, ratio=0.2, max_tokens=20).num_approximate_tokens
    again = kitchen.serve(PROMPT)
    assert again.num_cached_tokens == again.num_approximate_tokens == 0
    assert exact(again, PROMPT)
    third = kitchen.serve(PROMPT)
    assert third.num_cached_tokens > 0, "what was computed exactly is in the cache"
    assert exact(third, PROMPT)


def test_blended_kv_is_never_offered_for_saving_or_held(kitchen):
    scheduler, asked = kitchen.pair.scheduler, []
    scheduler.on_computed = lambda **given: asked.append(given)  # type: ignore[method-assign]
    scheduler.on_finished = lambda request, **given: asked.append(given)  # type: ignore[method-assign]
    scheduler.finished_params = lambda request: asked.append(request)  # type: ignore[method-assign]
    kitchen.engine.stage("transfer").transfers.connector.strategy = scheduler
    assert kitchen.serve(PROMPT, ratio=0.2, max_tokens=20).num_approximate_tokens
    assert asked == []
    kitchen.serve(PROMPT)
    assert asked, "an exact one is offered"


def test_nobody_gets_it_without_asking():
    kitchen = Kitchen(prefix_caching=False)
    kitchen.learn()
    for params in (None, {}, {"blend": False}, {"blend": "yes"}, {"blend": 1}, {"blend": True, "blend_ratio": "half"}):
        end = kitchen.serve(PROMPT, transfer_params=params)
        assert end.num_approximate_tokens == 0
        assert exact(end, PROMPT)


def test_other_tenants_chunks_are_not_found():
    kitchen = Kitchen()
    kitchen.learn(tenant="one")
    assert kitchen.serve(PROMPT, ratio=0.2, tenant="two").num_approximate_tokens == 0
    assert kitchen.serve(PROMPT, ratio=0.2, tenant="one", cache_salt="secret").num_approximate_tokens == 0
    assert kitchen.serve(PROMPT, ratio=0.2, tenant="one").num_approximate_tokens > 0


def test_exact_prefix_stays_exact_and_is_shared_as_before(kitchen):
    prompt = (*A, *C, *B, 5)
    end = kitchen.serve(prompt, ratio=0.2)
    (order,) = kitchen.backend.cache.made.orders
    assert order.num_exact == len(A)
    assert end.num_approximate_tokens == len(C) + len(B)
    assert end.num_cached_tokens - end.num_approximate_tokens == len(A)
    again = kitchen.serve((*A, 3, 3, 3))
    assert again.num_cached_tokens == len(A)
    assert exact(again, (*A, 3, 3, 3))


def test_sequence_that_is_computed_again_after_a_preemption_is_exact(kitchen):
    """The tokens it made before stay as they were; what follows them, and the blocks it leaves, are the model's."""
    name = kitchen.add(PROMPT, ratio=0.2, max_tokens=12)
    sequence = kitchen.running(name)
    kitchen.step()
    assert sequence.is_approximate
    kitchen.engine._state.preempt(sequence)
    made = len(sequence.tokens) - len(PROMPT)
    end = drain(kitchen.engine)[name]
    tokens = end.token_ids.tolist()
    assert end.num_preemptions == 1
    assert end.num_approximate_tokens > 0
    assert tokens[made + 1 :] == fake_text((*PROMPT, *tokens[: made + 1]), len(tokens) - made - 1, eos=-1)
    again = kitchen.serve(PROMPT)
    assert again.num_cached_tokens > 0
    assert exact(again, PROMPT)


def test_sequence_that_was_swapped_out_stays_apart():
    """Its approximate blocks come back with it: they are shared then as little as before."""
    kitchen = Kitchen(preemption="swap", swap_blocks=64)
    kitchen.learn()
    name = kitchen.add(PROMPT, ratio=0.2, max_tokens=12)
    sequence = kitchen.running(name)
    kitchen.engine._state.preempt(sequence)
    assert sequence.slot in kitchen.engine.inspect().stages["swap"].held
    end = drain(kitchen.engine)[name]
    assert end.num_preemptions == 1
    tokens = end.token_ids.tolist()
    assert tokens == fake_text_from_other_states(PROMPT, len(tokens)), "it went on with what it had"
    again = kitchen.serve(PROMPT)
    assert again.num_cached_tokens == 0
    assert exact(again, PROMPT)


@pytest.mark.parametrize("is_taken_back", [False, True])
def test_fill_that_fails_and_blocks_that_others_need_leave_the_prompt_to_be_computed(kitchen, is_taken_back):
    if not is_taken_back:
        kitchen.backend.cache.made.raises = RuntimeError("no")
    name = kitchen.add(PROMPT, ratio=0.2)
    if is_taken_back:
        while not kitchen.engine.inspect().sequences[name].claimed_blocks:
            kitchen.step()
        assert kitchen.sequence(name).is_approximate
        kitchen.engine._state.drop_claim(kitchen.sequence(name))
    end = drain(kitchen.engine)[name]
    assert end.num_approximate_tokens == 0
    assert exact(end, PROMPT)
    assert kitchen.engine.inspect().blocks.num_used == 0
    assert kitchen.serve(PROMPT).num_cached_tokens > 0, "it was computed, and is shared as any other"


@pytest.mark.parametrize("num_steps", range(9))
def test_abort_at_any_time_leaves_the_blocks_free_and_alone(num_steps):
    """One part of the work a step: what is left of it must not be done once the blocks are somebody else's."""
    kitchen = Kitchen(num_blocks=32)
    kitchen.learn()
    blender = kitchen.backend.cache.made
    blender.num_parts, blender.tick = 7, lambda: kitchen.clock.advance(0.05)
    name = kitchen.add(PROMPT, ratio=0.2)
    for _ in range(num_steps):
        kitchen.step()
    assert name in kitchen.engine.inspect().sequences
    kitchen.engine.abort(name)
    others = {kitchen.add(prompt, max_tokens=12): prompt for prompt in (document(7, 50), document(8, 50))}
    ends = drain(kitchen.engine)
    assert all(exact(ends[other], prompt) for other, prompt in others.items())
    assert kitchen.engine.inspect().blocks.num_used == 0
    assert not kitchen.engine.stage("transfer").transfers._loads


def test_long_work_is_spread_over_steps_while_others_go_on(kitchen):
    blender = kitchen.backend.cache.made
    blender.num_parts, blender.tick = 10, lambda: kitchen.clock.advance(0.05)
    other = kitchen.add(document(9), max_tokens=60)
    kitchen.step()
    name = kitchen.add(PROMPT, ratio=0.2, max_tokens=1)
    made = 0
    while name in kitchen.engine.inspect().sequences:
        before = kitchen.clock.now_s()
        made += len(kitchen.step().token_ids)
        assert kitchen.clock.now_s() - before <= 0.05 + 1e-9, "more than one part in a step"
    assert made > 8, "the other sequence stood still"
    assert exact(drain(kitchen.engine)[other], document(9))


@settings(max_examples=25, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck))
@given(st.data())
def test_exact_requests_are_exact_whatever_is_blended_beside_them(data):
    """Few blocks, so that sequences are preempted and chunks' blocks are taken; aborts at any step."""
    kitchen = Kitchen(num_blocks=45)
    kitchen.backend.kv_cache().blender().tick = lambda: kitchen.clock.advance(0.05)
    documents = [document(seed, 16) for seed in range(4)]
    prompts, ends, asked = {}, {}, {}
    for _ in range(14):
        order = data.draw(st.permutations(documents))[: data.draw(st.integers(1, 3))]
        prompt = (*sum(order, ()), *data.draw(st.lists(st.integers(1, 96), max_size=5)))
        ratio = data.draw(st.sampled_from([None, 0.2]))
        name = kitchen.add(prompt, ratio=ratio, max_tokens=data.draw(st.integers(1, 12)))
        prompts[name], asked[name] = prompt, ratio
        for _ in range(data.draw(st.integers(0, 8))):
            ends |= {end.request_id: end for end in kitchen.step().finished}
        if data.draw(st.integers(0, 4)) == 0:
            kitchen.engine.abort(name)
            del prompts[name]
    for _ in range(400):
        ends |= {end.request_id: end for end in kitchen.step().finished}
    for name, prompt in prompts.items():
        assert exact(ends[name], prompt) or (asked[name] and ends[name].num_approximate_tokens), name
    assert kitchen.engine.inspect().blocks.num_used == 0
