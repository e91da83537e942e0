from __future__ import annotations

import socket

import pytest

from trencadis.config.schema import ServerConfig
from trencadis_tools.doctor.server import check_server


@pytest.fixture
def taken():
    """A port on which somebody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.fixture
def free():
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_free_port_is_sound(found, told, free):
    check_server(found, ServerConfig(port=free))
    assert told() == [("ok", f"[server] port = {free}: free on 127.0.0.1")]


def test_any_free_port_is_sound(found, told):
    check_server(found, ServerConfig(port=0))
    assert told()[0][0] == "ok"


def test_taken_port_is_doubtful_since_it_may_be_our_own_server(found, taken, free):
    check_server(found, ServerConfig(port=taken, admin_port=free))
    first, second = found
    assert first.severity.value == "warn"
    assert f"another program listens on 127.0.0.1:{taken}" in first.message
    assert "--server.port" in first.remedy
    assert second.message == f"[server] admin_port = {free}: free on 127.0.0.1"


def test_admin_port_is_looked_at_on_loopback(found, told, taken, free):
    check_server(found, ServerConfig(port=free, admin_port=taken))
    assert told()[1][0] == "warn"


def test_address_of_another_machine_is_wrong(found, told, free):
    check_server(found, ServerConfig(host="192.0.2.1", port=free, api_keys=("k",)))
    assert told()[0][0] == "fail"


@pytest.mark.parametrize(("keys", "kinds"), [((), ["ok", "warn"]), (("secret",), ["ok"])])
def test_open_server_without_a_key_is_doubtful(found, told, free, keys, kinds):
    check_server(found, ServerConfig(host="0.0.0.0", port=free, api_keys=keys))
    assert [kind for kind, _ in told()] == kinds
