"""Prefill first with real processes: raw HTTP to one server, the answer's parameters to the other, and everything that goes wrong."""

from __future__ import annotations

import json
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


def holds_that_ended(engine: ServedProcess) -> tuple[float, float]:
    """Return how many holds were released and how many ran out."""
    released, expired = (
        engine.metric(f'trencadis_kv_holds_total{{connector="p2p",end="{end}"') for end in ("released", "expired")
    )
    return released, expired


def test_decode_engine_goes_on_where_the_prefill_engine_ended(engines: Engines, prefilled: Any) -> None:
    decode, prompt = engines[1], prompt_of(1)
    params, loaded = prefilled(prompt), loaded_by(decode)
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    answer = decode.post(prompt=prompt, kv_transfer_params=params, **GREEDY)
    assert tokens_of(answer) == alone(decode, prompt)
    assert loaded_by(decode) == loaded + 192
    assert "kv_transfer_params" not in answer.json()
    eventually(lambda: engines[0].metric("trencadis_kv_held_prefills") == 0)


def test_client_pays_less_only_for_what_was_cached_before_its_request(engines: Engines, prefilled: Any) -> None:
    """What the prefill engine has just computed was not; what it had was. Metrics of the decode engine count the same."""
    decode, prompt = engines[1], prompt_of(3, 300)
    longer = [*prompt, *prompt_of(4, 40)]
    metric = "trencadis_prompt_tokens_cached_total"
    before, loaded = decode.metric(metric), loaded_by(decode)
    first = decode.post(prompt=prompt, kv_transfer_params=prefilled(prompt), **GREEDY)
    assert (cached_of(first), decode.metric(metric) - before) == (0, 0)
    second = decode.post(prompt=longer, kv_transfer_params=prefilled(longer), **GREEDY)
    assert (cached_of(second), decode.metric(metric) - before) == (288, 288)
    assert loaded_by(decode) - loaded == 336, "of the second prompt, what was not there already"


def test_what_the_prefill_engine_had_cached_is_cached_for_the_client(engines: Engines, prefilled: Any) -> None:
    prefill, decode = engines
    prompt = prompt_of(5, 300)
    longer = [*prompt, *prompt_of(6, 40)]
    prefill.post(prompt=prompt, **GREEDY)
    params = prefilled(longer)
    assert params["remote_num_cached_tokens"] == 288
    assert cached_of(decode.post(prompt=longer, kv_transfer_params=params, **GREEDY)) == 288


def test_chat_and_streams_carry_the_parameters_too(engines: Engines) -> None:
    prefill, decode = engines
    body = {"messages": [{"role": "user", "content": "Tell me about mosaics. " * 12}], "temperature": 0}
    asked = {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    streamed = prefill.post("/v1/chat/completions", **body, **asked, stream=True).text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    (params,) = [event["kv_transfer_params"] for event in events if "kv_transfer_params" in event]
    loaded = loaded_by(decode)
    answer = decode.post("/v1/chat/completions", **body, max_tokens=8, kv_transfer_params=params)
    assert loaded_by(decode) - loaded == params["remote_num_tokens"] >= 16
    assert cached_of(answer) == 0
    other = prefill.post("/v1/chat/completions", **body, max_tokens=8).json()
    assert answer.json()["choices"][0]["message"] == other["choices"][0]["message"]


def test_streamed_text_completion_has_them_in_its_last_chunk(engines: Engines) -> None:
    streamed = (
        engines[0]
        .post(prompt=prompt_of(2), max_tokens=2, stream=True, kv_transfer_params={"do_remote_decode": True})
        .text
    )
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert ["kv_transfer_params" in event for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.slow
def test_many_at_once_say_what_they_say_alone(engines: Engines, prefilled: Any) -> None:
    decode, prompts = engines[1], [prompt_of(seed, 90 + seed) for seed in range(10, 18)]

    def one(prompt: list[int]) -> list[int]:
        return tokens_of(decode.post(prompt=prompt, kv_transfer_params=prefilled(prompt), **GREEDY))

    with ThreadPoolExecutor(4) as pool:
        said = list(pool.map(one, prompts))
    assert said == [alone(decode, prompt) for prompt in prompts]


@pytest.mark.parametrize(
    ("fault", "cause", "num_loaded"),
    [
        ({"flip_at": 120_000}, "corrupt", 16),
        ({"cut_at": 500_000}, "unreachable", 96),
        ({"stall_at": 300_000}, "deadline", 48),
    ],
    ids=["bit flip", "cut", "stall"],
)
def test_fault_on_the_way_costs_tokens_computed_again(
    engines: Engines, prefilled: Any, fault: dict[str, int], cause: str, num_loaded: int
) -> None:
    """A block is 80 KiB here; those that came whole before the fault are used."""
    decode, prompt = engines[1], prompt_of(20 + len(cause))
    before, loaded = (
        decode.metric(f'trencadis_kv_transfer_failures_total{{cause="{cause}",connector="p2p"'),
        loaded_by(decode),
    )
    params = prefilled(prompt)
    with FaultProxy(params["remote_port"]) as proxy:
        proxy.to_client.set(**fault)
        answer = decode.post(prompt=prompt, kv_transfer_params={**params, "remote_port": proxy.port}, **GREEDY)
    assert tokens_of(answer) == alone(decode, prompt)
    assert loaded_by(decode) == loaded + num_loaded
    assert decode.metric(f'trencadis_kv_transfer_failures_total{{cause="{cause}",connector="p2p"') == before + 1


@pytest.mark.parametrize(
    "body",
    [{"prompt": [5] * 100_000}, {"temperature": -1}, {"no_such_field": 1}, {"model": "another"}],
    ids=["prompt too long", "bad value", "unknown field", "unknown model"],
)
def test_request_that_the_decode_engine_refuses_frees_the_blocks_before_their_lease_ends(
    engines: Engines, prefilled: Any, body: dict[str, Any]
) -> None:
    prefill, decode = engines
    eventually(lambda: prefill.metric("trencadis_kv_held_prefills") == 0)
    released, expired = holds_that_ended(prefill)
    params = prefilled(prompt_of(30))
    assert prefill.metric("trencadis_kv_held_prefills") == 1
    answer = decode.post(**{"prompt": [5], "kv_transfer_params": params, **body})
    assert answer.status_code in (400, 404)
    eventually(lambda: prefill.metric("trencadis_kv_held_prefills") == 0)
    assert holds_that_ended(prefill) == (released + 1, expired)


def test_blocks_that_nobody_fetches_are_free_after_the_lease(engines: Engines, prefilled: Any) -> None:
    prefill = engines[0]
    expired = prefill.metric('trencadis_kv_holds_total{connector="p2p",end="expired"')
    prefilled(prompt_of(31))
    assert prefill.metric("trencadis_kv_held_bytes") > 0
    assert eventually(lambda: prefill.metric("trencadis_kv_held_bytes") == 0) > 2.5
    assert prefill.metric('trencadis_kv_holds_total{connector="p2p",end="expired"') == expired + 1


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "remote_engine_id": "x", "remote_request_id": "y", "remote_host": "192.0.2.1"},
        {"do_remote_prefill": True, "remote_host": {"a": [1]}, "remote_port": -1, "remote_block_ids": "z"},
    ],
)
def test_parameters_that_lead_nowhere_change_nothing(engines: Engines, params: dict[str, Any]) -> None:
    decode, prompt = engines[1], prompt_of(32)
    assert tokens_of(decode.post(prompt=prompt, kv_transfer_params=params, **GREEDY)) == alone(decode, prompt)


@pytest.mark.parametrize("params", ["text", 5, [1], {"a": "x" * 70_000}])
def test_parameters_that_are_none_are_refused_in_words(engines: Engines, params: Any) -> None:
    answer = engines[1].post(prompt=[5], kv_transfer_params=params)
    assert answer.status_code == 400
    assert "transfer_params" in answer.json()["error"]["message"]


@pytest.mark.slow
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
