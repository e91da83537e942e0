from __future__ import annotations

from server_doubles import NoEngine, OneEngine, ask, assert_error, make_context

from trencadis.async_llm import AsyncLLM
from trencadis.config import load_config
from trencadis.registry import resolve_plan
from trencadis.server.admin import make_admin_app
from trencadis.server.supervisor import Supervisor


def page(fake_house, engines, **overrides):
    config, registry = fake_house()
    app = make_admin_app(
        make_context(engines),
        supervisor=Supervisor(lambda: None, max_restarts=0),
        registry=registry,
        plan=resolve_plan(config, registry),
        resolved=load_config(environ={}, overrides=overrides),
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


def test_the_engine_that_serves_is_described(fake_house):
    import asyncio

    llm = AsyncLLM.from_config(*fake_house())
    try:
        engine = page(fake_house, OneEngine(llm))["engine"]
    finally:
        asyncio.run(llm.close())
    assert (engine["serves"], engine["num_live_requests"], engine["plan_hash"]) == (True, 0, llm.plan_hash)
    assert engine["model"]["architecture"] == "Fake"
