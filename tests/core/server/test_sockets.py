from __future__ import annotations

import socket

import pytest

from trencadis.errors import ConfigError
from trencadis.server.sockets import listen, url_of


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


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.1"])
def test_an_address_that_is_not_ours_is_said_in_words(host):
    with pytest.raises(ConfigError, match=r"host|server.port"):
        listen(host, 0)


def test_an_ipv6_address_is_written_in_brackets():
    try:
        listener = listen("::1", 0)
    except ConfigError:
        pytest.skip("this machine has no IPv6")
    with listener:
        assert url_of(listener).startswith("http://[::1]:")
