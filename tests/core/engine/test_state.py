"""Whose blocks a sequence may hold: isolation of tenants and salts in whole engines."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from trencadis.records import Request, SamplingParams
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fakes import FakeBackend, fake_text

SIZE = 4
PREFIX = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)


def request(name: str, tokens: tuple[int, ...], **terms: Any) -> Request:
    params = SamplingParams(max_tokens=4, temperature=0.0)
    return Request(request_id=name, prompt_token_ids=tokens, params=params, **terms)


def engine_of(**options: Any) -> Any:
    return make_engine(backend=FakeBackend(eos=-1, max_model_len=80), block_size=SIZE, **options)


def test_the_same_prompt_of_two_tenants_is_computed_twice_and_of_one_once() -> None:
    engine = engine_of()
    tokens = tuple(range(20, 40))
    hits = []
    for number, tenant in enumerate(["a", "b", "a", "b"]):
        engine.add(request(str(number), tokens, tenant=tenant))
        hits.append(drain(engine)[str(number)].num_cached_tokens)
    assert hits == [0, 0, 16, 16]


def test_a_listed_prefix_is_computed_once_for_all_tenants_and_what_follows_it_by_each() -> None:
    engine = engine_of(shared_prefixes=[PREFIX])
    tokens = (*PREFIX, *range(20, 34))
    hits = []
    for number, tenant in enumerate(["a", "b", "a"]):
        engine.add(request(str(number), tokens, tenant=tenant))
        hits.append(drain(engine)[str(number)].num_cached_tokens)
    assert hits == [0, 8, 20]


@settings(phases=[Phase.explicit, Phase.generate], max_examples=40)
@given(seed=st.integers(0, 2**32), lists_prefix=st.booleans())
def test_two_tenants_never_hold_one_block_unless_a_listed_prefix_fills_it(seed: int, lists_prefix: bool) -> None:
    rng = random.Random(seed)
    engine = engine_of(
        num_blocks=rng.choice([30, 60]),
        max_num_seqs=4,
        max_num_batched_tokens=rng.choice([8, 64]),
        shared_prefixes=[PREFIX] if lists_prefix else (),
    )
    state = engine._state
    requests, ends = {}, {}
    for number in range(20):
        tokens = (*PREFIX[: rng.choice([0, 5, 10])], *(rng.randint(1, 2) for _ in range(rng.randint(1, 10))))
        one = request(str(number), tokens, tenant=rng.choice("abc"))
        requests[one.request_id] = one
        engine.add(one)
        for _ in range(rng.randint(0, 3)):
            ends.update((end.request_id, end) for end in engine.step().finished)
            holders: dict[int, list[tuple[Request, int]]] = {}
            for slot in state.running.tolist():
                sequence = state.table.sequence(slot)
                for index, block in enumerate(state.blocks_of(sequence).tolist()):
                    holders.setdefault(block, []).append((sequence.request, index))
            for held in holders.values():
                assert len({index for _, index in held}) == 1
                (first, index), end = held[0], (held[0][1] + 1) * SIZE
                if len({one.tenant for one, _ in held}) > 1:
                    assert lists_prefix
                    assert first.prompt_token_ids[:end] == PREFIX[:end]
                    assert end <= len(PREFIX)
    ends.update(drain(engine, 2000))
    for name, end in ends.items():
        one = requests[name]
        expected = fake_text(one.prompt_token_ids, 4, eos=-1)
        assert end.token_ids.tolist() == expected
