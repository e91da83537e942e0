from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from typing import Any

import attrs
import httpx
import pytest

from support.server.server_doubles import OneEngine, app_with, assert_error, client_of
from trencadis.client.async_llm import AsyncLLM
from trencadis.config import Config
from trencadis.config.schema import TenantConfig
from trencadis.interfaces import SchedulingPolicy
from trencadis.records import Request, RequestTerms
from trencadis.registry import Registry
from trencadis_server.config import ServerConfig
from trencadis_server.errors import ApiError
from trencadis_server.generation.generation_call import terms_of
from trencadis_server.protocol.generation import GenerationRequest
from trencadis_server.routes.completions import make_router

HELLO = [{"role": "user", "content": "Hello there"}]


def terms(caller: str, *, allows_weight: bool = False, **fields: Any) -> RequestTerms:
    return terms_of(caller, GenerationRequest(model="m", **fields), allows_weight=allows_weight)


def test_neither_keys_nor_users_of_a_key_share_tenants_and_cached_prefixes() -> None:
    assert (terms("key").tenant, terms("key").cache_salt) == ("key", "key")
    assert (terms("").tenant, terms("").cache_salt) == ("", "")
    assert terms("key", user="ann").tenant == "key/ann"
    askers = [
        terms(caller, **who) for caller in ("", "key", "key/ann") for who in ({}, {"user": "ann"}, {"user": "ben"})
    ]
    assert len({one.cache_salt for one in askers}) == len(askers)


def test_requests_of_one_salt_share_within_a_key_whoever_their_user_is() -> None:
    salted = terms("key", cache_salt="s").cache_salt
    assert terms("key", cache_salt="s", user="ann").cache_salt == salted
    others = [terms("other", cache_salt="s"), terms("key"), terms("key", user="s"), terms("s"), terms("", user="s")]
    assert salted not in {one.cache_salt for one in others}


def test_a_prompt_of_another_user_is_not_found_in_the_cache(serve: Any) -> None:
    async def use(api: Any) -> list[int]:
        cached = []
        for who in ({"user": "ann"}, {"user": "ben"}, {}, {"user": "ann"}):
            answer = await api.ok("/v1/completions", prompt=list(range(5, 69)), max_tokens=1, **who)
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        return cached

    first, other, nobody, again = serve(use)
    assert (first, other, nobody) == (0, 0, 0)
    assert again > 0


def test_targets_in_milliseconds_become_seconds_and_none_is_no_target() -> None:
    given = terms("key", ttft_target_ms=250, tpot_target_ms=40.0, priority=-3)
    assert (given.ttft_target_s, given.tpot_target_s, given.priority) == (0.25, 0.04, -3)
    plain = terms("key")
    assert (plain.ttft_target_s, plain.tpot_target_s, plain.priority, plain.weight) == (math.inf, math.inf, 0, None)


def test_clients_raise_their_share_only_where_the_operator_lets_them() -> None:
    with pytest.raises(ApiError, match=r"server.client_weights") as caught:
        terms("key", weight=5.0)
    assert (caught.value.status, caught.value.param) == (400, "weight")
    assert terms("key", weight=5.0, allows_weight=True).weight == 5.0


class Notes(SchedulingPolicy):
    def __init__(self) -> None:
        self.requests: list[Request] = []

    def on_added(self, *, slot: int, request: Request) -> None:
        self.requests.append(request)


@pytest.mark.parametrize(
    ("path", "prompt"), [("/v1/completions", {"prompt": [5, 6]}), ("/v1/chat/completions", {"messages": HELLO})]
)
def test_extension_fields_reach_the_policy_from_both_endpoints(serve: Any, path: str, prompt: dict[str, Any]) -> None:
    policy = Notes()
    fields = {
        "priority": 4,
        "user": "ann",
        "ttft_target_ms": 300,
        "tpot_target_ms": 20,
        "weight": 2.5,
        "cache_salt": "s",
    }
    config = ServerConfig(client_weights=True)
    serve(lambda api: api.ok(path, max_tokens=1, **prompt, **fields), config=config, policy=lambda: policy)
    (seen,) = policy.requests
    assert (seen.priority, seen.tenant, seen.weight) == (4, "/ann", 2.5)
    assert (seen.ttft_target_s, seen.tpot_target_s, seen.cache_salt) == (0.3, 0.02, "\0s")


def test_a_tenant_over_its_cap_is_answered_429_with_the_time_to_come_back(
    fake_house: Callable[..., tuple[Config, Registry]],
) -> None:
    """One runs and is held within its step, two more come: one may wait."""
    entered, released = threading.Event(), threading.Event()

    def held(batch: Any, one: Any) -> None:
        entered.set()
        released.wait(20)

    config, registry = fake_house(fails=held)
    config = attrs.evolve(
        config,
        engine=attrs.evolve(config.engine, max_num_seqs=1),
        scheduling=attrs.evolve(config.scheduling, tenants={"key": TenantConfig(max_waiting=1)}),
    )

    async def main() -> list[httpx.Response]:
        async with AsyncLLM.from_config(config, registry) as llm:
            app = app_with(make_router(), engines=OneEngine(llm), more={}, api_keys=("key:secret",))
            async with client_of(app) as client:
                client.headers["authorization"] = "Bearer secret"
                body = {"model": "fake", "prompt": [5, 6], "max_tokens": 3}
                posts = [asyncio.create_task(client.post("/v1/completions", json=body))]
                await asyncio.to_thread(entered.wait, 20)
                posts += [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(2)]
                while llm.num_live < 3:
                    await asyncio.sleep(0)
                released.set()
                return await asyncio.gather(*posts)

    answers = asyncio.run(main())
    assert sorted(answer.status_code for answer in answers) == [200, 200, 429]
    (refused,) = [answer for answer in answers if answer.status_code == 429]
    assert int(refused.headers["retry-after"]) >= 1
    assert "tenant 'key' has 1 waiting and may have 1" in assert_error(refused, 429, code="rate_limit_exceeded")
