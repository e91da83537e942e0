"""Prefixes that come layer by layer to a real model: greedy tokens are those of an engine that computed all by itself."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from support.core.invariants import broken_invariants
from support.faultproxy import FaultProxy
from support.kv.p2p_ends import LOOPBACK_PEERS, SECRET
from trencadis.client.factory import configure
from trencadis.engine.build import build_engine
from trencadis.engine.engine import Engine
from trencadis.records import FinishedSequence, Request, SamplingParams

PROMPT = tuple(5 + (i * 37 + i * i % 11) % 200 for i in range(230))
BESIDE = tuple(7 + i * 3 % 150 for i in range(40))
_PATIENCE_S = 60.0


@contextlib.contextmanager
def engine(layout: str, *, layer_wait_s: float = _PATIENCE_S, **p2p: Any) -> Iterator[Engine]:
    """Have an engine on the demo model with the connector ``p2p``."""
    tables = {
        "observer": {"names": []},
        "backend": {"name": "torch", "torch": {"layout": layout}},
        "engine": {"max_num_batched_tokens": 128, "warmup": False},
        "cache": {"num_blocks": 64, "layer_wait_s": layer_wait_s},
        "kv_connector": {"name": "p2p", "p2p": {"secret": SECRET, "peers": list(LOOPBACK_PEERS), **p2p}},
    }
    config, registry = configure({"path": "demo", "dtype": "float32"}, config_file=None, tables=tables)
    one = build_engine(config, registry=registry)
    assert isinstance(one, Engine)
    try:
        yield one
    finally:
        one.close()


def add(one: Engine, name: str, prompt: tuple[int, ...], *, num_tokens: int, params: Any = None) -> None:
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    one.add(Request(request_id=name, prompt_token_ids=prompt, params=sampling, transfer_params=params))


def run(one: Engine, done: Callable[[dict[str, FinishedSequence]], bool]) -> dict[str, FinishedSequence]:
    ends: dict[str, FinishedSequence] = {}
    until_s = time.monotonic() + _PATIENCE_S
    while not done(ends):
        assert time.monotonic() < until_s, "it never happens"
        ends |= {end.request_id: end for end in one.step().finished}
        assert broken_invariants(one) == []
        if one.is_stalled:
            threading.Event().wait(0.001)
    return ends


@pytest.fixture(scope="module", params=["ragged", "padded"])
def layout(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def truth(layout: str) -> Mapping[str, list[int]]:
    """What an engine says that computes everything by itself."""
    with engine(layout) as one:
        add(one, "r", PROMPT, num_tokens=12)
        add(one, "beside", BESIDE, num_tokens=40)
        ends = run(one, lambda ends: len(ends) == 2)
    return {name: end.token_ids.tolist() for name, end in ends.items()}


@pytest.fixture(scope="module")
def producer(layout: str) -> Iterator[Engine]:
    with engine(layout) as one:
        yield one


def pulled(
    producer: Engine, consumer: Engine, *, fault: Mapping[str, Any] | None = None
) -> dict[str, FinishedSequence]:
    """Serve the prompt, which the producer has computed, beside a request that decodes."""
    add(producer, "p", PROMPT, num_tokens=1, params={"do_remote_decode": True})
    params = dict(run(producer, lambda ends: "p" in ends)["p"].transfer_params or {})
    with FaultProxy(params["remote_port"]) as proxy:
        proxy.to_client.set(**(fault or {}))
        add(consumer, "beside", BESIDE, num_tokens=40)
        for _ in range(4):
            consumer.step()
        add(consumer, "r", PROMPT, num_tokens=12, params={**params, "remote_port": proxy.port})
        return run(consumer, lambda ends: len(ends) == 2)


@pytest.mark.representatives(1)
def test_tokens_are_the_same_and_no_request_waits_for_kv(
    layout: str, producer: Engine, truth: Mapping[str, list[int]]
) -> None:
    with engine(layout, layerwise=True) as consumer:
        ends = pulled(producer, consumer)
        transfers = consumer.stage("transfer").transfers
        assert (transfers.num_loaded, transfers.layered.num_discarded) == (1, 0)
    assert {name: end.token_ids.tolist() for name, end in ends.items()} == truth
    assert ends["r"].num_cached_tokens == 0, "it was not cached before"
