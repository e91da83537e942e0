"""Opening a server: its configuration, its sockets, its parts."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import socket
import subprocess
import threading
import types

import attrs
import httpx
import pytest
from fastapi import FastAPI

from trencadis.config import Config, load_config
from trencadis.config.schema import EngineConfig, ModelConfig, ObserverConfig
from trencadis.errors import ConfigError, ConfigValueError, InvalidRequestError, UnknownComponentError
from trencadis_server.config import ServerConfig
from trencadis_server.lifecycle.opening import (
    collect_rarely,
    config_to_serve,
    listen,
    make_context,
    model_names_of,
    open_server,
    url_of,
)


@pytest.fixture
def house(fake_house):
    """Makes a configuration to serve from a thread, on any free port."""

    def make(**server):
        config, registry = fake_house()
        table = ServerConfig(**{"port": 0, "observer": "", **server})
        engine = attrs.evolve(config.engine, placement="thread")
        return attrs.evolve(config, tables={"server": table}, engine=engine), registry

    return make


def open_(config, registry):
    return open_server(config, registry, resolved=load_config(environ={}))


def test_the_port_listens_before_anything_is_loaded_and_is_free_afterwards(house):
    with open_(*house()) as server:
        port = int(server.url.rpartition(":")[2])
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    with listen("127.0.0.1", port):
        pass


@pytest.mark.parametrize(("keys", "count"), [((), 1), (("secret",), 0)])
def test_a_server_for_the_whole_network_without_a_key_is_warned_of_once(house, caplog, keys, count):
    with caplog.at_level("WARNING", "trencadis.server"), open_(*house(host="0.0.0.0", api_keys=keys)):
        said = [line for line in caplog.messages if line.startswith('[server] host = "0.0.0.0" without api_keys: ')]
    assert len(said) == count


def test_it_serves_the_api_and_the_administration_on_ports_of_their_own(house):
    with listen("127.0.0.1", 0) as probe:
        admin_port = probe.getsockname()[1]
    lines = []

    async def main(server):
        service = server.service(lines.append)
        task = asyncio.create_task(service.run())
        async with httpx.AsyncClient() as client, asyncio.timeout(20):
            while not lines:
                await asyncio.sleep(0.005)
            ready = await client.get(f"{server.url}/ready")
            models = await client.get(f"{server.url}/v1/models")
            shown = await client.get(f"{server.admin_url}/admin/plugins")
            outside = await client.get(f"{server.url}/admin/plugins")
        service.stop()
        await task
        return ready, models, shown, outside

    with open_(*house(admin_port=admin_port, model_name="sea,ocean")) as server:
        greeting = server.greeting()
        ready, models, shown, outside = asyncio.run(main(server))
    assert greeting == [
        f"Listening at {server.url}/v1 for sea, ocean; loading.",
        f"Administration: http://127.0.0.1:{admin_port}/admin/plugins",
    ]
    assert lines[:1] == [f"Ready: Fake, float32, 256 tokens, plan {shown.json()['engine']['plan_hash']}."]
    assert ready.status_code == 200
    assert [model["id"] for model in models.json()["data"]] == ["sea", "ocean"]
    assert shown.status_code == 200
    assert outside.status_code == 404


@pytest.mark.parametrize("keys", [(), ("secret",)])
@pytest.mark.parametrize("generates", [True, False])
def test_the_command_to_try_fits_a_terminal_and_works_as_typed(house, keys, generates):
    llm = types.SimpleNamespace(model=types.SimpleNamespace(generates=generates))
    with open_(*house(host="0.0.0.0", api_keys=keys)) as server:
        lines = server.example(llm)
    assert max(map(len, lines)) <= 80
    typed = "\n".join(lines[1:])
    shown = subprocess.run(
        ["sh", "-c", f"curl() {{ printf '%s\\n' \"$@\"; }}\n{typed}"],
        env={"API_KEY": "secret"},
        capture_output=True,
        text=True,
        check=True,
    )
    url, *rest = shown.stdout.splitlines()
    route = "completions" if generates else "embeddings"
    assert url == f"http://127.0.0.1:{server.url.rpartition(':')[2]}/v1/{route}"
    headers = [value for flag, value in itertools.pairwise(rest) if flag == "-H"]
    assert headers == [*(["Authorization: Bearer secret"] if keys else []), "Content-Type: application/json"]
    assert ("prompt" if generates else "input") in json.loads(rest[-1])
    assert "secret" not in "".join(lines)


def test_an_impossible_key_ends_it_in_words(house):
    async def main(server):
        server.service()

    with open_(*house(api_keys=("name:",))) as server, pytest.raises(ConfigValueError, match="api_keys"):
        asyncio.run(main(server))


def test_an_observer_of_the_server_that_nobody_offers_is_blamed_on_its_own_setting(house):
    with pytest.raises(UnknownComponentError, match=r'"promtheus" \(from server\.observer\): no such component'):
        open_(*house(observer="promtheus"))


@pytest.mark.parametrize(
    ("keys", "cap"), [((), 64), (("a:1",), 64), (("a:1", "a:2"), 64), (("a:1", "b:2"), 32), (("1", "2"), 32)]
)
def test_one_key_has_a_share_of_the_server_where_there_are_others(house, keys, cap):
    config, _ = house(api_keys=keys, max_requests=64)
    admission = make_context(config, None).admission
    with admission.hold(1, cap, caller="a"):
        pass
    with pytest.raises(InvalidRequestError), admission.hold(1, cap + 1, caller="a"):
        pass


def test_the_openapi_document_is_made_before_anybody_asks_and_beside_the_event_loop(house, monkeypatch):
    made = []
    openapi = FastAPI.openapi

    def noted(app):
        made.append(threading.get_ident())
        return openapi(app)

    monkeypatch.setattr(FastAPI, "openapi", noted)

    async def main(server):
        server.service()
        await asyncio.get_running_loop().shutdown_default_executor()
        return threading.get_ident()

    with open_(*house()) as server:
        loop = asyncio.run(main(server))
    assert len(made) == 1
    assert loop not in made


@attrs.frozen(kw_only=True)
class Labelled:
    model_name: str = ""


@attrs.frozen(kw_only=True)
class Plain:
    interval_s: float = 1.0


def test_the_engine_gets_a_process_of_its_own_and_the_observer_of_the_metrics_once_unless_told_otherwise(house):
    config, registry = house()
    config = attrs.evolve(config, engine=EngineConfig(), observer=ObserverConfig(names=()))
    with open_(config, registry) as server:
        assert server._config.engine.placement == "process"
    thread = Config(engine=EngineConfig(placement="thread"))
    served = [config_to_serve(thread), config_to_serve(Config(), placement="thread"), config_to_serve(Config())]
    assert [one.engine.placement for one in served] == ["thread", "thread", "process"]
    named = Config(observer=ObserverConfig(names=("prometheus", "log")))
    without = Config(tables={"server": ServerConfig(observer="")})
    names = [config_to_serve(one).observer.names for one in (Config(), named, without)]
    assert names == [("log", "prometheus"), ("prometheus", "log"), ("log",)]


def test_observers_that_ask_for_the_models_name_are_told_it():
    components = {"a": Labelled(), "b": Labelled(model_name="mine"), "c": Plain(), "pkg:Class": {"model_name": ""}}
    served = config_to_serve(
        Config(
            observer=ObserverConfig(names=(), components=components), tables={"server": ServerConfig(model_name="x, y")}
        )
    ).observer.components
    assert served == {**components, "a": Labelled(model_name="x")}


def test_the_model_is_served_under_the_names_given_or_its_path():
    assert model_names_of(Config(model=ModelConfig(path="dir/model"))) == ("dir/model",)
    assert model_names_of(Config(tables={"server": ServerConfig(model_name=" a, b ,a,")})) == ("a", "b")


def test_a_port_that_cannot_be_had_is_said_in_words_at_once(house):
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        in_use = f"= {port}: the port is in use on 127.0.0.1. "
        for setting, meaning in (("port", "any free one"), ("admin_port", "no administration pages")):
            with pytest.raises(ConfigError) as caught:
                open_(*house(**{setting: port}))
            assert str(caught.value) == f"server.{setting} {in_use}Choose another server.{setting}; 0: {meaning}."
        with pytest.raises(ConfigError, match=r"Choose another a.b; 0: none at all\.$"):
            listen("127.0.0.1", port, setting="a.b", meaning_of_zero="none at all")


@pytest.mark.parametrize(
    ("host", "hint"), [("no.such.host.invalid", "Write 127.0.0.1"), ("203.0.113.1", "Correct server.host")]
)
def test_an_address_that_is_not_ours_is_said_in_words(host, hint):
    with pytest.raises(ConfigError, match=rf'^\[server\] host = "{host}": .* {hint}'):
        listen(host, 0)


def test_an_ipv6_address_is_written_in_brackets():
    try:
        listener = listen("::1", 0)
    except ConfigError:
        pytest.skip("this machine has no IPv6")
    with listener:
        assert url_of(listener).startswith("http://[::1]:")


@pytest.mark.parametrize(("before", "after"), [(700, 10_000), (20_000, 20_000), (0, 0)])
def test_what_was_loaded_is_out_of_collections_which_are_rare_from_then_on(before, after):
    threshold, num_frozen = gc.get_threshold(), gc.get_freeze_count()
    gc.unfreeze()
    try:
        gc.set_threshold(before, 11, 12)
        collect_rarely()
        assert gc.get_threshold() == (after, 11, 12)
        assert gc.get_freeze_count() > 0
        gc.set_threshold(5, 11, 12)
        collect_rarely()
        assert gc.get_threshold() == (5, 11, 12), "a second engine changes nothing"
    finally:
        gc.set_threshold(*threshold)
        if not num_frozen:
            gc.unfreeze()
