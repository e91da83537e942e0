"""Administration pages: plugins, scheduling, role, and what their requests have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from support.server.server_doubles import NoEngine, OneEngine, ask, assert_error, make_context
from support.strategies.hostile_policies import house
from trencadis.client.async_llm import AsyncLLM
from trencadis.config import load_config
from trencadis.config.load import ResolvedConfig
from trencadis.config.settings import settings_of
from trencadis.errors import WrongRoleError
from trencadis.records import SamplingParams
from trencadis.registry import resolve_plan
from trencadis_server.config import ServerConfig
from trencadis_server.lifecycle.supervisor import Supervisor
from trencadis_server.routes.admin import HostMiddleware, make_admin_app


def app_of(engines: Any, config: Any, registry: Any, resolved: ResolvedConfig | None = None, **server: Any) -> Any:
    return make_admin_app(
        make_context(engines, **server),
        supervisor=Supervisor(lambda: None, max_restarts=0),
        registry=registry,
        plan=resolve_plan(config, registry),
        resolved=resolved or ResolvedConfig(config=config, sources={}, values={}, settings=settings_of()),
    )


def test_components_plan_and_configuration_are_shown_while_the_engine_loads_and_no_secret_is(fake_house):
    overrides = {"engine.seed": 7, "server.api_keys": ["ann:sk-secret"], "cache.key": "pepper"}
    resolved = load_config(components={"server": ServerConfig}, environ={}, overrides=overrides)
    shown, other = ask(
        app_of(NoEngine(), *fake_house(), resolved=resolved), ("GET", "/admin/plugins"), ("GET", "/admin/other")
    )
    assert_error(other, 404, code="unknown_url")
    assert "sk-secret" not in shown.text
    assert "pepper" not in shown.text
    shown = shown.json()
    active = {row["noun"] for row in shown["components"] if row["active"]}
    assert active == {"bucketing", "scheduling", "eviction", "sampling", "backend", "executor"}
    assert shown["plan"]["choices"]["backend"] == "fake"
    rows = {row["path"]: row for row in shown["config"]}
    assert (rows["engine.seed"]["value"], rows["engine.seed"]["source"]) == ("7", "argument")
    assert shown["engine"] == {"num_restarts": 0, "serves": False, "reason": "The engine is loading."}
    assert shown["server"]["num_requests"] == 0


def test_pages_take_their_own_key_and_never_one_of_a_client(fake_house):
    client, own = {"api_keys": ("ann:sk-a", "sk-b")}, {"admin_key": "a:b"}
    given = (None, "Bearer sk-a", "Bearer sk-b", "Bearer a:b", "Bearer b", "Basic a:b")
    for server, statuses in (
        ({}, [200] * 6),
        (client, [403] * 6),
        (own, [401, 401, 401, 200, 401, 401]),
        (client | own, [401, 401, 401, 200, 401, 401]),
    ):
        headers = [{"headers": {"authorization": one} if one else {}} for one in given]
        answers = ask(app_of(NoEngine(), *fake_house(), **server), *(("GET", "/admin/plugins", one) for one in headers))
        assert [answer.status_code for answer in answers] == statuses


HERE = ("127.0.0.1:8001", "localhost:1", "[::1]:8001", "LocalHost", "127.0.0.1", "[::1]")
ELSEWHERE = (
    *("rebound.example:8001", "localhost.evil.example", "127.0.0.1.nip.io", "127.0.0.1@evil", "", "[::1", "::1"),
    *("a:b:c", "ÿ" * 500, "localhost:", "localhost:1x", "evil/127.0.0.1"),
)


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [*(((host,), 200) for host in HERE), *(((host,), 403) for host in ELSEWHERE), ((), 403), (("localhost",) * 2, 403)],
)
@pytest.mark.representatives(20)
def test_requests_for_one_name_of_this_machine_alone_are_served(hosts: tuple[str, ...], expected: int) -> None:
    statuses: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    async def receive() -> Message:
        raise AssertionError("it has no body")

    scope = {"type": "http", "headers": [(b"host", host.encode("latin-1")) for host in hosts]}
    asyncio.run(HostMiddleware(app)(scope, receive, send))
    assert statuses == [expected]


URL = "http://127.0.0.1:8001"


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
    assert (shown["engine"]["serves"], shown["engine"]["model"]["architecture"]) == (True, "Fake")
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
        for name in ("priority", "fair_share", "deadline", "fcfs"):
            answer = (await post(client, name=name)).json()
            assert (answer["policy"], answer["plan_hash"]) == (name, llm.plan_hash)
        assert answer["previous"]["policy"] == "deadline"
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
def test_what_cannot_be_is_answered_400_in_the_words_of_the_configuration(placement: str, tmp_path: Path):
    made = str(tmp_path / "made")

    async def use(client: httpx.AsyncClient, llm: AsyncLLM, engines: OneEngine) -> None:
        before = (await client.get("/admin/scheduling")).json()
        for table, words in (
            ({"name": "fcsf"}, '[scheduling] name = "fcsf" (from POST /admin/scheduling): no such component'),
            ({"name": "fcfs", "options": {"victim": 1}}, "[scheduling.fcfs] victim = 1"),
            (
                {"nmae": "fcfs"},
                'nmae (from POST /admin/scheduling): no such key. Did you mean "name"? There are: name, options, shadow.',
            ),
            ({"name": ["fcfs"]}, "must be text"),
            (
                {"name": "support.strategies.hostile_policies:DeafEars"},
                "(from POST /admin/scheduling): it would import",
            ),
            ({"name": "os:mkdir", "options": {"path": made}}, "it would import os and call mkdir"),
            ({"name": "fcfs", "shadow": "os:mkdir"}, "it would import os and call mkdir"),
            ({"name": "shortest_first", "options": {"predictor": "os:mkdir"}}, "it would import os and call mkdir"),
            ({}, "nothing to change"),
        ):
            answer = await post(client, **table)
            assert words in assert_error(answer, 400, code="invalid_scheduling")
        assert not Path(made).exists()
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
        for wrong in (b"", b"{", b"[1]", b'"text"', b"\xff", b"[" * 40000):
            answer = await client.post("/admin/scheduling", content=wrong, headers={"content-type": "application/json"})
            assert_error(answer, 400, code="invalid_json")
        huge = await client.post(
            "/admin/scheduling", content=b" " * 2**17, headers={"content-type": "application/json"}
        )
        assert huge.status_code == 413
        assert (await active(client))[0] == "fcfs"
        for host in ("localhost:8001", "[::1]:8001"):
            json = {"content-type": "Application/JSON; charset=utf-8", "host": host}
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


@pytest.mark.representatives(1)
@pytest.mark.parametrize("placement", ["thread", "process"])
def test_role_is_shown_changed_and_felt(placement: str) -> None:
    async def use(client: httpx.AsyncClient, llm: AsyncLLM, engines: OneEngine) -> None:
        assert (await client.get("/admin/role")).json() == {"role": "both", "num_live": 0}
        answer = await client.post("/admin/role", json={"role": "prefill"})
        assert (answer.status_code, answer.json()) == (200, {"role": "prefill", "previous": "both", "num_live": 0})
        with pytest.raises(WrongRoleError, match="role of this engine is prefill"):
            async for _ in llm.generate([1, 2, 3]):
                pass
        await client.post("/admin/role", json={"role": "both"})
        assert [output async for output in llm.generate([1, 2, 3])][-1].finished

    administer(use, engine={"placement": placement}, kv_connector={"name": "host_offload"})


def test_change_that_is_none_is_refused_in_words() -> None:
    async def use(client: httpx.AsyncClient, llm: AsyncLLM, engines: OneEngine) -> None:
        for table in ({"role": "router"}, {"role": "prefill"}, {}, {"role": None}):
            answer = await client.post("/admin/role", json=table)
            assert answer.status_code == 400
            assert "role" in answer.json()["error"]["message"]
        assert (await client.post("/admin/role", content=b"x")).status_code == 415
        assert (await client.get("/admin/role")).json()["role"] == "both"

    administer(use)


def test_replicas_of_one_engine_are_refused_in_words() -> None:
    async def use(client: httpx.AsyncClient, llm: AsyncLLM, engines: OneEngine) -> None:
        headers = {"content-type": "application/json"}
        for answer in (
            await client.get("/admin/replicas"),
            await client.post("/admin/replicas/0/restart", headers=headers),
        ):
            assert_error(answer, 400, code="invalid_replica")
            assert "there is one engine only" in answer.json()["error"]["message"]
        assert (await client.post("/admin/replicas/0/restart")).status_code == 415
        assert (await client.post("/admin/replicas/x/restart", headers=headers)).status_code == 404

    administer(use)


@pytest.mark.slow
def test_replicas_are_shown_and_restarted() -> None:
    async def use(client: httpx.AsyncClient, llm: AsyncLLM, engines: OneEngine) -> None:
        assert [row["state"] for row in (await client.get("/admin/replicas")).json()["replicas"]] == ["ready"] * 2
        answer = await client.post("/admin/replicas/1/restart", headers={"content-type": "application/json"})
        assert [row["state"] for row in answer.json()["replicas"]] == ["ready", "down"]
        answer = await client.post("/admin/replicas/0/restart", headers={"content-type": "application/json"})
        assert_error(answer, 400, code="invalid_replica")
        while (await client.get("/admin/replicas")).json()["replicas"][1]["state"] != "ready":
            await asyncio.sleep(0.01)

    administer(use, parallel={"data": 2})


def test_a_flight_record_is_written_on_request_where_there_is_a_recorder(tmp_path):
    async def use(client: httpx.AsyncClient, llm: AsyncLLM, engines: OneEngine) -> None:
        assert_error(await client.post("/admin/flight-record"), 415, code="invalid_content_type")
        answer = await client.post("/admin/flight-record", json={})
        assert answer.json() == {"paths": [str(path) for path in tmp_path.glob("*-request.flight")]}
        assert len(list(tmp_path.iterdir())) == 1

    async def without(client: httpx.AsyncClient, llm: AsyncLLM, engines: OneEngine) -> None:
        answer = await client.post("/admin/flight-record", json={})
        assert "keeps no flight record" in assert_error(answer, 400, code="no_flight_record")

    administer(use, flight_recorder={"folder": str(tmp_path)})
    administer(without, flight_recorder={"num_steps": 0})
