"""What a store may do to an engine in service: cost cache misses, and nothing else.

The cases of one connector alone are in the suites that every connector passes; here are those of a whole service: many clients at
once, tenants on one store, and requests that have nothing to do with it.
"""

from __future__ import annotations

import pytest

from support.kv.faulty_store import VOCAB_SIZE, Shelf
from trencadis.client.llm import LLM
from trencadis.clock import SimulatedClock
from trencadis.interfaces import ComponentContext
from trencadis.records import Request, SamplingParams
from trencadis_kv.interfaces import KVPolicy
from trencadis_kv.store.defaults import IdentityCodec
from trencadis_testing.engines import make_engine
from trencadis_testing.fakes import FakeBackend, fake_text
from trencadis_testing.kv_faults import Fault

OPENING = tuple(range(100, 140))


def text_of(prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    return tuple(fake_text(prompt, num_tokens, vocab_size=VOCAB_SIZE, eos=-1))


def num_cached(shelf: Shelf, *, salt: str, key: str = "", namespace: str = "default") -> int:
    """Serve the opening in an engine of its own; returns how much of it was loaded."""
    with LLM.from_config(*shelf.house(key=key, namespace=namespace)) as llm:
        (output,) = llm.generate([OPENING], SamplingParams(max_tokens=4), cache_salts=salt)
    assert output.outputs[0].token_ids == text_of(OPENING, 4)
    return output.num_cached_tokens


def blocks(shelf: Shelf) -> dict[str, bytes]:
    """Return the objects that are blocks: a description of their layout lies beside them."""
    return {key: value for key, value in shelf.objects.items() if not key.endswith("/layout")}


def test_no_tenant_reads_what_another_one_saved():
    shelf = Shelf()
    assert num_cached(shelf, salt="blue") == 0
    saved = blocks(shelf)
    assert len(saved) == len(OPENING) // 4
    assert num_cached(shelf, salt="green") == 0
    assert num_cached(shelf, salt="blue", key="a secret") == 0
    assert num_cached(shelf, salt="blue", namespace="elsewhere") == 0
    assert num_cached(shelf, salt="blue") == len(OPENING) - 4


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
        engine.add(Request(request_id="first", prompt_token_ids=OPENING, params=SamplingParams(max_tokens=8)))
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
                prompt = (*OPENING, 300 + step)
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
        assert all(ended[f"{step}"] == list(text_of((*OPENING, 300 + step), 3)) for step in range(5, 79, 10))
    finally:
        engine.close()
        pair.worker.close()
