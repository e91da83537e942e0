from __future__ import annotations

import asyncio

import httpx

from support.server.server_doubles import NoEngine, OneEngine, ask, assert_error, make_context
from trencadis.client.async_llm import AsyncLLM
from trencadis.config import load_config
from trencadis.registry import resolve_plan
from trencadis_server.config import ServerConfig
from trencadis_server.lifecycle.supervisor import Supervisor
from trencadis_server.routes.admin import make_admin_app


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


def test_pages_take_the_keys_of_clients_unless_there_is_one_of_their_own(fake_house):
    client, own = {"api_keys": ("ann:sk-a", "sk-b")}, {"admin_key": "a:b"}
    given = (None, "Bearer sk-a", "Bearer sk-b", "Bearer a:b", "Bearer b", "Basic a:b")
    assert statuses(fake_house, {}, *given) == [200] * 6
    assert statuses(fake_house, client, *given) == [401, 200, 200, 401, 401, 401]
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
