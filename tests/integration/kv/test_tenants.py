"""What a tenant can learn of another one's prompts: nothing, by no key, no guess, and no number of steps or calls.

Blocks are found by a hash that is chained over tokens, salt and model, and keyed with ``cache.key``. The hashes are written out here from
their definition, so that a tenant, or whoever reads the store, is given everything but the key.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import attrs
import pytest

from support.kv.engine_pairs import Station, prompt_of, true_text
from support.kv.faulty_store import VOCAB_SIZE, Shelf
from trencadis.client.llm import LLM
from trencadis.clock import SimulatedClock
from trencadis.interfaces import ComponentContext
from trencadis.interfaces.block_store import BlockStore
from trencadis.records import Request, SamplingParams
from trencadis_kv.interfaces import KVPolicy
from trencadis_kv.store.defaults import IdentityCodec
from trencadis_testing.engines import make_engine
from trencadis_testing.fakes import FakeBackend, fake_text
from trencadis_testing.kv_faults import DictStore, Fault

BLOCK_SIZE = 4


PROMPT = tuple(range(100, 140))


KEY = "correct horse battery staple"


def hashes_by_definition(prompt: Sequence[int], *, key: str, compatibility: str, salt: str) -> list[str]:
    """``h_i = BLAKE2b(h_i-1 + tokens_i)`` behind a root that is keyed and knows model and salt."""
    secret = hashlib.blake2b(key.encode(), digest_size=32).digest()
    root = compatibility.encode() + b"\0" + salt.encode()
    found = hashlib.blake2b(root, key=secret, person=b"kv1-root", digest_size=32).digest()
    hashes = []
    for start in range(0, len(prompt) // BLOCK_SIZE * BLOCK_SIZE, BLOCK_SIZE):
        tokens = b"".join(token.to_bytes(4, "little") for token in prompt[start : start + BLOCK_SIZE])
        found = hashlib.blake2b(found + tokens, digest_size=32).digest()
        hashes.append(found.hex())
    return hashes


def serve(shelf: Shelf, *, salt: str, key: str = "", namespace: str = "default") -> tuple[int, str]:
    """Serve the prompt in an engine of its own; returns how much of it was loaded, and what the engine calls its blocks' kind."""
    with LLM.from_config(*shelf.house(key=key, namespace=namespace)) as llm:
        (output,) = llm.generate([PROMPT], SamplingParams(max_tokens=4), cache_salts=salt)
        engine: Any = llm._frontend.engine
        compatibility = engine.engine._state.hasher._compatibility.decode()
    assert output.outputs[0].token_ids == text_of(PROMPT, 4)
    return output.num_cached_tokens, compatibility


def num_cached(shelf: Shelf, **terms: str) -> int:
    return serve(shelf, **terms)[0]


def names_in(shelf: Shelf) -> set[str]:
    return {key.rsplit("/", 1)[1] for key in blocks(shelf)}


def test_keys_of_objects_are_what_the_definition_says_and_nobody_computes_them_without_the_key() -> None:
    shelf = Shelf()
    _, compatibility = serve(shelf, salt="blue", key=KEY)
    known = {"compatibility": compatibility, "salt": "blue"}
    assert set(hashes_by_definition(PROMPT, key=KEY, **known)) == names_in(shelf)
    for guess in ("", "default", "secret", KEY[:-1], KEY + " ", KEY.upper()):
        assert not names_in(shelf) & set(hashes_by_definition(PROMPT, key=guess, **known))


@attrs.define
class Counting(BlockStore):
    """Another store, and what was asked of it."""

    inner: BlockStore
    asked: Counter[str]

    def contains(self, keys: Sequence[str]) -> int:
        found = self.inner.contains(keys)
        self.asked.update(contains=1, keys=len(keys), found=found)
        return found

    def get(self, keys: Sequence[str], targets: Sequence[memoryview]) -> Sequence[int]:
        self.asked.update(get=1)
        return self.inner.get(keys, targets)

    def put(self, keys: Sequence[str], objects: Sequence[Sequence[memoryview]]) -> int:
        self.asked.update(put=1, kept=len(keys))
        return self.inner.put(keys, objects)

    def delete(self, keys: Sequence[str]) -> None:
        self.asked.update(delete=1)
        self.inner.delete(keys)

    def interrupt(self) -> None:
        self.inner.interrupt()

    def close(self) -> None:
        self.inner.close()


def test_prompt_of_another_tenant_takes_as_many_steps_and_calls_as_one_that_nobody_asked_before() -> None:
    """What a clock could tell is made of these; both must be the same to the last one."""
    asked: Counter[str] = Counter()
    objects: dict[str, bytes] = {}
    clock, parts = SimulatedClock(), {"kv_policy": KVPolicy, "kv_codec": IdentityCodec}
    context = ComponentContext(clock=clock, seed=0, make=lambda noun, _: parts[noun]())
    pair: Any = (
        Shelf()
        .connector(context)
        .with_stores(  # type: ignore[attr-defined]
            lambda _: Counting(DictStore(objects), asked)
        )
    )
    engine = make_engine(
        connector=pair,
        clock=clock,
        backend=FakeBackend(vocab_size=VOCAB_SIZE, eos=-1, max_model_len=256),
        num_blocks=200,
        warmup=False,
    )

    def observed(salt: str, prompt: tuple[int, ...]) -> tuple[int, int, Counter[str]]:
        """Returns tokens that were cached, steps that computed, and calls of the store."""
        asked.clear()
        steps = engine.totals.num_steps
        engine.add(
            Request(
                request_id=f"{salt} {prompt[:2]} {clock.now_s()}",
                prompt_token_ids=prompt,
                params=SamplingParams(max_tokens=4),
                cache_salt=salt,
            )
        )
        while not (ends := engine.step().finished):
            pair.worker.wait_idle(1.0)
            clock.advance(0.001)
        assert ends[0].token_ids.tolist() == fake_text(prompt, 4, vocab_size=VOCAB_SIZE, eos=-1)
        assert pair.worker.wait_idle(60.0)
        return ends[0].num_cached_tokens, engine.totals.num_steps - steps, Counter(asked)

    try:
        fresh = tuple(range(300, 340))
        observed("blue", tuple(range(500, 540)))
        first = observed("blue", PROMPT)
        again = observed("blue", PROMPT)
        assert again != first, "a cache that is not seen to work shows nothing"
        assert again[0] == len(PROMPT) - BLOCK_SIZE
        assert observed("green", PROMPT) == observed("green", fresh) == first
    finally:
        engine.close()
        pair.worker.close()


def test_parameters_of_another_tenants_prefill_are_of_no_use() -> None:
    """Who has got hold of them, and knows the prompt, still has another salt."""
    prompt = prompt_of(1, 41)
    with Station() as giver, Station() as taker:
        params = giver.prefill(prompt)
        for salt, num_cached in (("green", 0), ("", 40)):
            taker.engine.add(
                Request(
                    request_id=salt or "its own",
                    prompt_token_ids=prompt,
                    params=SamplingParams(max_tokens=5),
                    cache_salt=salt,
                    transfer_params=giver.prefill(prompt) if not salt else params,
                )
            )
            name = salt or "its own"
            taker.until(lambda name=name: name in taker.ends)  # type: ignore[misc]
            assert taker.ends[name].token_ids.tolist() == true_text(prompt, 5)
            assert taker.ends[name].num_cached_tokens == num_cached


def text_of(prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    return tuple(fake_text(prompt, num_tokens, vocab_size=VOCAB_SIZE, eos=-1))


def blocks(shelf: Shelf) -> dict[str, bytes]:
    """Return the objects that are blocks: a description of their layout lies beside them."""
    return {key: value for key, value in shelf.objects.items() if not key.endswith("/layout")}


def test_no_tenant_reads_what_another_one_saved():
    shelf = Shelf()
    assert num_cached(shelf, salt="blue") == 0
    saved = blocks(shelf)
    assert len(saved) == len(PROMPT) // 4
    assert num_cached(shelf, salt="green") == 0
    assert num_cached(shelf, salt="blue", key="a secret") == 0
    assert num_cached(shelf, salt="blue", namespace="elsewhere") == 0
    assert num_cached(shelf, salt="blue") == len(PROMPT) - 4


def test_objects_of_another_tenant_under_ones_own_keys_are_not_believed():
    """Whoever can write to the store can put anything under any key; a block's identity is in the object."""
    shelf = Shelf()
    num_cached(shelf, salt="blue")
    blue = blocks(shelf)
    num_cached(shelf, salt="green")
    green = blocks(shelf).keys() - blue.keys()
    shelf.objects.update(zip(green, blue.values(), strict=True))
    assert num_cached(shelf, salt="green") == 0


@pytest.mark.parametrize("fault", [Fault.NONE, Fault.GONE, Fault.FLIPPED, Fault.STALLS, Fault.SLOW, Fault.RAISES])
def test_who_decodes_gets_a_token_in_every_step_whatever_becomes_of_others_loads(fault: Fault):
    """Exactly: a step that waits for a load, or that is lost to one, would be one without a token."""
    shelf, clock = Shelf(), SimulatedClock()
    parts = {"kv_policy": KVPolicy, "kv_codec": IdentityCodec}
    context = ComponentContext(clock=clock, seed=0, make=lambda noun, _: parts[noun]())
    pair = shelf.connector(context)
    engine = make_engine(
        connector=pair,
        clock=clock,
        backend=FakeBackend(vocab_size=VOCAB_SIZE, eos=-1, max_model_len=400),
        num_blocks=400,
        block_size=4,
        prefix_caching=False,
        load_timeout_s=1.0,
        async_scheduling=False,
        warmup=False,
    )
    try:
        engine.add(Request(request_id="first", prompt_token_ids=PROMPT, params=SamplingParams(max_tokens=8)))
        while engine.has_work:
            engine.step()
        assert pair.worker.wait_idle(60.0)  # type: ignore[attr-defined]
        shelf.faults.begin(fault, calls={"get"})
        decodes = engine.add(
            Request(request_id="decodes", prompt_token_ids=(7, 8), params=SamplingParams(max_tokens=80))
        )
        engine.step()
        ended = {}
        for step in range(79):
            if step % 10 == 5:
                prompt = (*PROMPT, 300 + step)
                engine.add(Request(request_id=f"{step}", prompt_token_ids=prompt, params=SamplingParams(max_tokens=3)))
            pair.worker.wait_idle(0.02)  # type: ignore[attr-defined]
            deltas = engine.step()
            got = dict(zip(deltas.slots.tolist(), deltas.num_tokens.tolist(), strict=True))
            assert got.get(decodes) == 1, f"step {step} brought no token"
            ended.update({end.request_id: end.token_ids.tolist() for end in deltas.finished})
            clock.advance(0.05)
        assert engine.stage("transfer").transfers.num_loads > 0, "nothing was loaded, so nothing was shown"
        assert ended["decodes"] == list(text_of((7, 8), 80))
        shelf.faults.end()
        while engine.has_work:
            ended.update({end.request_id: end.token_ids.tolist() for end in engine.step().finished})
            clock.advance(0.05)
        assert all(ended[f"{step}"] == list(text_of((*PROMPT, 300 + step), 3)) for step in range(5, 79, 10))
    finally:
        engine.close()
        pair.worker.close()
