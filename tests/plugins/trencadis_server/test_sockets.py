from __future__ import annotations

import socket

import pytest

from trencadis.errors import ConfigError
from trencadis_server.lifecycle.sockets import listen, url_of


def test_port_zero_gives_a_free_port_that_listens():
    with listen("127.0.0.1", 0) as listener:
        host, port = listener.getsockname()
        assert url_of(listener) == f"http://127.0.0.1:{port}"
        socket.create_connection((host, port), timeout=5).close()


def test_a_port_in_use_is_said_in_words():
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"server.port = {port}: the port is in use on 127.0.0.1"):
            listen("127.0.0.1", port)
        with pytest.raises(ConfigError, match=r"server.admin_port = .*Choose another server.admin_port"):
            listen("127.0.0.1", port, setting="server.admin_port")


def test_the_hint_says_what_zero_stands_for():
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=r"Choose another server.port; 0: any free one\.$"):
            listen("127.0.0.1", port)
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
