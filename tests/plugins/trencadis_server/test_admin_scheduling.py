"""The administration of scheduling over a real engine, on a thread and in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from support.server.server_doubles import NoEngine, OneEngine, ask, assert_error, make_context
from support.strategies.hostile_policies import house
from trencadis.client.async_llm import AsyncLLM
from trencadis.config.load import ResolvedConfig
from trencadis.config.settings import settings_of
from trencadis.records import SamplingParams
from trencadis.registry import resolve_plan
from trencadis_server.lifecycle.supervisor import Supervisor
from trencadis_server.routes.admin import make_admin_app

URL = "http://127.0.0.1:8001"


def app_of(engines: Any, config: Any, registry: Any) -> Any:
    return make_admin_app(
        make_context(engines),
        supervisor=Supervisor(lambda: None, max_restarts=0),
        registry=registry,
        plan=resolve_plan(config, registry),
        resolved=ResolvedConfig(config=config, sources={}, values={}, settings=settings_of()),
    )


def administer(use: Callable[[httpx.AsyncClient, AsyncLLM, OneEngine], Awaitable[None]], **tables: Any) -> None:
    config, registry = house(**tables)

    async def main() -> None:
        async with AsyncLLM.from_config(config, registry) as llm:
            engines = OneEngine(llm)
            transport = httpx.ASGITransport(app_of(engines, config, registry))
            async with httpx.AsyncClient(transport=transport, base_url=URL) as client:
                await asyncio.wait_for(use(client, llm, engines), timeout=60)

    asyncio.run(main())


async def post(client: httpx.AsyncClient, **table: Any) -> httpx.Response:
    return await client.post("/admin/scheduling", json=table)


async def active(client: httpx.AsyncClient) -> tuple[str, str]:
    """Return which policy the list of plugins calls active, and the engine's hash."""
    shown = (await client.get("/admin/plugins")).json()
    (name,) = [row["name"] for row in shown["components"] if row["noun"] == "scheduling" and row["active"]]
    assert shown["plan"]["choices"]["scheduling"] == name
    return name, shown["engine"]["plan_hash"]


@pytest.mark.representatives(1)
@pytest.mark.parametrize("placement", ["thread", "process"])
def test_a_swap_while_serving_changes_no_token_and_is_shown_everywhere(placement: str):
    async def use(client: httpx.AsyncClient, llm: AsyncLLM, engines: OneEngine) -> None:
        async def generate(index: int) -> tuple[int, ...]:
            params = SamplingParams(max_tokens=40, temperature=0)
            async for output in llm.generate((index, 5, 6), params, request_id=f"r{index}", tenant=str(index % 2)):
                pass
            return tuple(output.outputs[0].token_ids)

        alone = [await generate(index) for index in range(4)]
        running = [asyncio.ensure_future(generate(index)) for index in range(4)]
        before = llm.plan_hash
        for name in ("priority", "fair_share", "support.strategies.hostile_policies:Raises", "fcfs"):
            answer = (await post(client, name=name)).json()
            assert (answer["policy"], answer["plan_hash"]) == (name, llm.plan_hash)
        assert answer["previous"]["policy"] == "support.strategies.hostile_policies:Raises"
        assert llm.plan_hash == before, "the same plan has the same hash"
        assert await asyncio.gather(*running) == alone
        answer = (await post(client, name="priority", options={"age_s": 5}, shadow="fcfs")).json()
        assert answer["previous"]["plan_hash"] == before != llm.plan_hash == answer["plan_hash"]
        assert await active(client) == ("priority", llm.plan_hash)
        shown = (await client.get("/admin/scheduling")).json()
        assert (shown["policy"], shown["options"]["age_s"], shown["configured"]) == ("priority", 5.0, "fcfs")
        assert shown["shadow"]["policy"] == "fcfs"
        story = (await client.get("/admin/explain/r3")).json()["requests"]
        assert [one["state"] for one in story] == ["finished"]
        assert sum(span["num_tokens"] for span in story[0]["spans"]) >= 42
        assert (await post(client, shadow=None)).json()["shadow"] is None

    administer(use, engine={"placement": placement})


@pytest.mark.representatives(1)
@pytest.mark.parametrize("placement", ["thread", "process"])
def test_what_cannot_be_is_answered_400_in_the_words_of_the_configuration(placement: str):
    async def use(client: httpx.AsyncClient, llm: AsyncLLM, engines: OneEngine) -> None:
        before = (await client.get("/admin/scheduling")).json()
        for table, words in (
            ({"name": "fcsf"}, '[scheduling] name = "fcsf" (from POST /admin/scheduling): no such component'),
            ({"name": "fcfs", "options": {"victim": 1}}, "[scheduling.fcfs] victim = 1"),
            (
                {"nmae": "fcfs"},
                'nmae (from POST /admin/scheduling): no such key. There are: name, options, shadow. Did you mean "name"?',
            ),
            ({"name": ["fcfs"]}, "must be text"),
            ({"name": "support.strategies.hostile_policies:DeafEars"}, None),
            ({}, "nothing to change"),
        ):
            answer = await post(client, **table)
            if words is None:  # nobody is there whom it could not bear
                assert answer.status_code == 200
                await post(client, name="fcfs")
            else:
                assert words in assert_error(answer, 400, code="invalid_scheduling")
        assert (await client.get("/admin/scheduling")).json() == before
        unknown = await client.get("/admin/explain/nobody")
        assert "was never seen" in assert_error(unknown, 404, code="unknown_request")

    administer(use, engine={"placement": placement})


def test_an_engine_that_was_opened_again_has_the_configured_policy():
    async def use(client: httpx.AsyncClient, llm: AsyncLLM, engines: OneEngine) -> None:
        await post(client, name="priority")
        config, registry = house()
        async with AsyncLLM.from_config(config, registry) as another:
            engines.llm = another
            assert await active(client) == ("fcfs", another.plan_hash)
            assert (await client.get("/admin/scheduling")).json()["policy"] == "fcfs"
            await post(client, name="deadline")
            assert (await active(client))[0] == "deadline"
        engines.llm = llm

    administer(use)


def test_a_web_page_cannot_make_a_browser_change_anything():
    async def use(client: httpx.AsyncClient, llm: AsyncLLM, engines: OneEngine) -> None:
        body = b'{"name": "priority"}'
        for headers, status, code in (
            ({"content-type": "text/plain"}, 415, "invalid_content_type"),
            ({}, 415, "invalid_content_type"),
            ({"content-type": "application/json", "host": "evil.example:8001"}, 403, "wrong_host"),
        ):
            assert_error(await client.post("/admin/scheduling", content=body, headers=headers), status, code=code)
        for wrong in (b"{", b"[1]", b"\xff", b"[" * 40000):
            answer = await client.post("/admin/scheduling", content=wrong, headers={"content-type": "application/json"})
            assert_error(answer, 400, code="invalid_json")
        huge = await client.post(
            "/admin/scheduling", content=b" " * 2**17, headers={"content-type": "application/json"}
        )
        assert huge.status_code == 413
        assert (await active(client))[0] == "fcfs"
        for host in ("localhost:8001", "[::1]:8001"):
            json = {"content-type": "application/json; charset=utf-8", "host": host}
            assert (await client.post("/admin/scheduling", content=body, headers=json)).status_code == 200

    administer(use)


def test_without_an_engine_the_answer_is_503():
    config, registry = house()
    app = app_of(NoEngine(), config, registry)
    json = {"json": {"name": "fcfs"}, "headers": {"host": "127.0.0.1"}}
    for answer in ask(
        app, ("GET", "/admin/scheduling"), ("POST", "/admin/scheduling", json), ("GET", "/admin/explain/a")
    ):
        assert_error(answer, 503, code="engine_loading")
