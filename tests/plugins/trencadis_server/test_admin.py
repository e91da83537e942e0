"""Administration pages: plugins, scheduling, role, and what their requests have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import Request
from starlette.types import Message, Receive, Scope, Send

from support.server.server_doubles import NoEngine, OneEngine, ask, assert_error, make_context
from support.strategies.hostile_policies import house
from trencadis.client.async_llm import AsyncLLM
from trencadis.config import load_config
from trencadis.config.load import ResolvedConfig
from trencadis.config.settings import settings_of
from trencadis.errors import ContinuationError, WrongRoleError
from trencadis.records import SamplingParams
from trencadis.registry import resolve_plan
from trencadis_server.config import ServerConfig
from trencadis_server.errors import ApiError, as_api_error
from trencadis_server.lifecycle.supervisor import Supervisor
from trencadis_server.routes.admin import HostMiddleware, check_content_type, make_admin_app, table_of


def page(fake_house, engines, **overrides):
    config, registry = fake_house()
    app = make_admin_app(
        make_context(engines),
        supervisor=Supervisor(lambda: None, max_restarts=0),
        registry=registry,
        plan=resolve_plan(config, registry),
        resolved=load_config(components={"server": ServerConfig}, environ={}, overrides=overrides),
    )
    shown, other = ask(app, ("GET", "/admin/plugins"), ("GET", "/admin/other"))
    assert_error(other, 404, code="unknown_url")
    return shown.json()


def test_components_plan_and_configuration_are_shown_while_the_engine_loads(fake_house):
    shown = page(fake_house, NoEngine(), **{"engine.seed": 7})
    active = {row["noun"] for row in shown["components"] if row["active"]}
    assert active == {"bucketing", "scheduling", "eviction", "sampling", "backend", "executor"}
    assert shown["plan"]["choices"]["backend"] == "fake"
    rows = {row["path"]: row for row in shown["config"]}
    assert (rows["engine.seed"]["value"], rows["engine.seed"]["source"]) == ("7", "argument")
    assert shown["engine"] == {"num_restarts": 0, "serves": False, "reason": "The engine is loading."}
    assert shown["server"]["num_requests"] == 0


def test_no_secret_is_shown(fake_house):
    shown = page(fake_house, NoEngine(), **{"server.api_keys": ["ann:sk-secret"], "cache.key": "pepper"})
    assert "sk-secret" not in str(shown)
    assert "pepper" not in str(shown)


def statuses(fake_house, config, *authorizations, host="localhost"):
    """Return the statuses of answers to requests with these headers; None: without one."""
    fake, registry = fake_house()
    app = make_admin_app(
        make_context(NoEngine(), **config),
        supervisor=Supervisor(lambda: None, max_restarts=0),
        registry=registry,
        plan=resolve_plan(fake, registry),
        resolved=load_config(environ={}),
    )

    async def main():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=f"http://{host}") as client:
            headers = [{} if one is None else {"authorization": one} for one in authorizations]
            return [(await client.get("/admin/plugins", headers=one)).status_code for one in headers]

    return asyncio.run(main())


def test_pages_take_their_own_key_and_never_one_of_a_client(fake_house):
    client, own = {"api_keys": ("ann:sk-a", "sk-b")}, {"admin_key": "a:b"}
    given = (None, "Bearer sk-a", "Bearer sk-b", "Bearer a:b", "Bearer b", "Basic a:b")
    assert statuses(fake_house, {}, *given) == [200] * 6
    assert statuses(fake_house, client, *given) == [403] * 6
    assert statuses(fake_house, own, *given) == [401, 401, 401, 200, 401, 401]
    assert statuses(fake_house, client | own, *given) == [401, 401, 401, 200, 401, 401]


def test_pages_answer_to_the_names_of_this_machine_alone(fake_house):
    assert statuses(fake_house, {}, None, host="rebound.example:8001") == [403]
    assert statuses(fake_house, {"admin_key": "k"}, None, "Bearer k", host="rebound.example") == [403, 403]


def test_the_engine_that_serves_is_described(fake_house):
    llm = AsyncLLM.from_config(*fake_house())
    try:
        engine = page(fake_house, OneEngine(llm))["engine"]
    finally:
        asyncio.run(llm.close())
    assert (engine["serves"], engine["num_live_requests"], engine["plan_hash"]) == (True, 0, llm.plan_hash)
    assert engine["model"]["architecture"] == "Fake"


def request(kind: str) -> Request:
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "scheme": "http"}
    return Request({**scope, "headers": [(b"content-type", kind.encode())]})


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8"])
def test_json_is_taken(kind: str) -> None:
    check_content_type(request(kind))


@pytest.mark.parametrize("kind", ["text/plain", "", "application/x-www-form-urlencoded"])
def test_what_a_web_page_may_send_unasked_is_not(kind: str) -> None:
    with pytest.raises(ApiError) as error:
        check_content_type(request(kind))
    assert error.value.status == 415


def status_for(*hosts: str) -> int:
    """Return the status of an answer to a request for hosts."""
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
    return statuses[0]


@pytest.mark.parametrize("host", ["127.0.0.1:8001", "localhost:1", "[::1]:8001", "LocalHost", "127.0.0.1", "[::1]"])
def test_requests_for_this_machine_are_served(host: str) -> None:
    assert status_for(host) == 200


@pytest.mark.parametrize(
    "host",
    [
        "rebound.example:8001",
        "localhost.evil.example",
        "127.0.0.1.nip.io",
        "127.0.0.1@evil",
        "",
        "[::1",
        "::1",
        "a:b:c",
        "ÿ" * 500,
        "localhost:",
        "localhost:1x",
        "evil/127.0.0.1",
    ],
)
def test_requests_for_other_hosts_are_not(host: str) -> None:
    assert status_for(host) == 403


def test_requests_for_no_host_and_for_two_are_not() -> None:
    assert (status_for(), status_for("localhost", "localhost")) == (403, 403)


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"text"', b"[" * 100_000, b"\xff"])
def test_body_that_is_no_object_is_refused_in_words(body: bytes) -> None:
    with pytest.raises(ApiError, match="JSON") as error:
        table_of(body)
    assert error.value.status == 400
    assert table_of(b'{"a": 1}') == {"a": 1}


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


def test_client_of_the_wrong_role_is_answered_with_503_and_need_not_come_again() -> None:
    error = as_api_error(WrongRoleError("request 'r' was refused: the role of this engine is prefill."))
    assert (error.status, error.code, error.headers["x-should-retry"]) == (503, "wrong_role", "false")


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


def test_a_request_that_no_replica_can_go_on_with_is_answered_with_503() -> None:
    error = as_api_error(ContinuationError("request 'r': its engine has ended, and no other can go on with it."))
    assert (error.status, error.code, error.headers["Retry-After"]) == (503, "engine_ended", "1")


def test_a_flight_record_is_written_on_request(tmp_path):
    async def use(client: httpx.AsyncClient, llm: AsyncLLM, engines: OneEngine) -> None:
        assert_error(await client.post("/admin/flight-record"), 415, code="invalid_content_type")
        answer = await client.post("/admin/flight-record", json={})
        assert answer.json() == {"paths": [str(path) for path in tmp_path.iterdir()]}
        assert len(list(tmp_path.glob("*-request.flight"))) == 1

    administer(use, flight_recorder={"folder": str(tmp_path)})


def test_without_a_recorder_there_is_no_record():
    async def use(client: httpx.AsyncClient, llm: AsyncLLM, engines: OneEngine) -> None:
        answer = await client.post("/admin/flight-record", json={})
        assert "keeps no flight record" in assert_error(answer, 400, code="no_flight_record")

    administer(use, flight_recorder={"num_steps": 0})
