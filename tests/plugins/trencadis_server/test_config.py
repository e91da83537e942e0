from __future__ import annotations

import contextlib
from typing import Any

import pytest

from trencadis.api import ResolvedConfig
from trencadis.config import load_config as load_any
from trencadis.config.explain import as_json, explain
from trencadis.errors import ConfigValueError
from trencadis_server.config import ServerConfig, server_of


def load_config(**sources: Any) -> ResolvedConfig:
    return load_any(components={"server": ServerConfig}, **sources)


def test_api_keys_are_read_from_the_environment_and_never_shown():
    resolved = load_config(environ={"TRENCADIS_SERVER__API_KEYS": "ops:s3cret-one,s3cret-two"})
    assert server_of(resolved.config).api_keys == ("ops:s3cret-one", "s3cret-two")
    shown = as_json(explain(resolved))
    assert "TRENCADIS_SERVER__API_KEYS" in shown
    assert "s3cret" not in shown


def test_the_server_listens_on_this_machine_alone_and_without_administration_by_default():
    server = server_of(load_config(environ={}).config)
    assert (server.host, server.port, server.admin_port) == ("127.0.0.1", 8000, 0)


@pytest.mark.parametrize(
    ("key", "value"), [("port", 65536), ("admin_port", -1), ("max_requests", 0), ("send_timeout_s", 0.0)]
)
def test_an_impossible_limit_is_refused_by_name(key, value):
    with pytest.raises(ConfigValueError, match=f"server.*{key}"):
        load_config(environ={}, overrides={"server": {key: value}})


@pytest.mark.parametrize(
    ("host", "keys", "is_open"),
    [("0.0.0.0", "", True), ("::", "", True), ("0.0.0.0", "k", False), ("127.0.0.1", "", False), ("::1", "", False)],
)
def test_a_server_that_others_reach_without_a_key_is_open_to_all_unless_it_requires_one(host, keys, is_open):
    flags = [f"--server.host={host}", f"--server.api-keys={keys}"]
    assert server_of(load_config(environ={}, flags=flags).config).is_open_to_all is is_open
    refusal = r"without api_keys, and server.require_key is set.*TRENCADIS_SERVER__API_KEYS"
    with pytest.raises(ConfigValueError, match=refusal) if is_open else contextlib.nullcontext():
        load_config(environ={}, flags=[*flags, "--server.require-key=true"])


def test_one_port_for_two_things_is_refused_with_who_set_it():
    with pytest.raises(ConfigValueError) as caught:
        load_config(environ={"TRENCADIS_SERVER__ADMIN_PORT": "8000"})
    assert str(caught.value) == (
        "[server] admin_port = 8000 (from environment TRENCADIS_SERVER__ADMIN_PORT): it is server.port as well, which must be "
        "another. Choose another server.admin_port; 0: no administration pages."
    )
    assert server_of(load_config(environ={}, flags=["--server.port=0", "--server.admin-port=0"]).config).port == 0
