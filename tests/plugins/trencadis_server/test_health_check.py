from __future__ import annotations

import socket

import pytest

from trencadis.api import Config
from trencadis.interfaces import Finding
from trencadis_server.config import with_server
from trencadis_server.health_check import check_server


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


def check(**server: object) -> list[Finding]:
    return list(check_server(with_server(Config(), **server)))


def kinds_of(found: list[Finding]) -> list[str]:
    return [item.severity.value for item in found]


def test_free_port_is_sound(free):
    (found,) = check(port=free)
    assert (found.severity.value, found.message) == ("ok", f"[server] port = {free}: free on 127.0.0.1")
    assert kinds_of(check(port=0)) == ["ok"]


def test_taken_port_is_doubtful_since_it_may_be_our_own_server(taken, free):
    first, second = check(port=taken, admin_port=free)
    assert first.severity.value == "warn"
    assert f"another program listens on 127.0.0.1:{taken}" in first.message
    assert "--server.port" in first.remedy
    assert second.message == f"[server] admin_port = {free}: free on 127.0.0.1"
    assert kinds_of(check(port=free, admin_port=taken)) == ["ok", "warn"]


def test_address_of_another_machine_is_wrong_and_an_open_server_without_a_key_doubtful(free):
    assert kinds_of(check(host="192.0.2.1", port=free, api_keys=("k",)))[0] == "fail"
    for keys, kinds in (((), ["ok", "warn"]), (("secret",), ["ok"])):
        assert kinds_of(check(host="0.0.0.0", port=free, api_keys=keys)) == kinds
