"""Prefill first with real processes: raw HTTP to one server, the answer's parameters to the other, and everything that goes wrong."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from support.eventually import eventually
from support.faultproxy import FaultProxy
from support.server.served_process import ServedProcess

Engines = tuple[ServedProcess, ServedProcess]
GREEDY = {"temperature": 0, "max_tokens": 10, "return_token_ids": True}


def prompt_of(seed: int, num_tokens: int = 200) -> list[int]:
    return [5 + (seed * 41 + i * 37 + i * i % 11) % 200 for i in range(num_tokens)]


def tokens_of(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


def cached_of(answer: httpx.Response) -> int:
    cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def loaded_by(engine: ServedProcess) -> float:
    """Return how many tokens' KV an engine has loaded so far."""
    return engine.metric('trencadis_kv_tokens_total{connector="p2p",direction="load"')


def alone(engine: ServedProcess, prompt: list[int]) -> list[int]:
    """Return what an engine says that knows nothing of the prompt; nothing of it stays in its cache."""
    return tokens_of(engine.post(prompt=prompt, cache_salt="alone", **GREEDY))


def test_decode_engine_goes_on_where_the_prefill_engine_ended(engines: Engines, prefilled: Any) -> None:
    decode, prompt = engines[1], prompt_of(1)
    params, loaded = prefilled(prompt), loaded_by(decode)
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    answer = decode.post(prompt=prompt, kv_transfer_params=params, **GREEDY)
    assert tokens_of(answer) == alone(decode, prompt)
    assert loaded_by(decode) == loaded + 192
    assert "kv_transfer_params" not in answer.json()
    eventually(lambda: engines[0].metric("trencadis_kv_held_prefills") == 0)


@pytest.mark.nightly
def test_prefill_engine_that_is_killed_before_or_during_the_pull_costs_no_answer(
    engines: Engines,
) -> None:
    doomed, decode = engines
    prompts = [prompt_of(40), prompt_of(41)]
    asked = {"max_tokens": 1, "temperature": 0, "kv_transfer_params": {"do_remote_decode": True}}
    during, before = (doomed.post(prompt=prompt, **asked).json()["kv_transfer_params"] for prompt in prompts)
    with FaultProxy(during["remote_port"]) as proxy, ThreadPoolExecutor(1) as pool:
        proxy.to_client.set(stall_at=200_000)
        moved = {**during, "remote_port": proxy.port}
        answer = pool.submit(lambda: decode.post(prompt=prompts[0], kv_transfer_params=moved, **GREEDY))
        assert proxy.to_client.happened.wait(20)
        doomed.kill()
        proxy.to_client.set()
        proxy.cut()
        assert tokens_of(answer.result(60)) == alone(decode, prompts[0])
    late = decode.post(prompt=prompts[1], kv_transfer_params=before, **GREEDY)
    assert tokens_of(late) == alone(decode, prompts[1])
    assert cached_of(late) == 0
