"""Health check of ``trencadis serve``: ports and keys."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

from trencadis.api import Config
from trencadis.interfaces import Finding
from trencadis_server.config import server_of

__all__ = ["check_server"]

_LOOPBACK = "127.0.0.1"


def check_server(config: Config) -> Iterator[Finding]:
    """Check that both ports can be bound, and that a server for other machines requires a key."""
    server = server_of(config)
    yield _check_port(server.host, server.port, key="port")
    if server.admin_port:
        yield _check_port(_LOOPBACK, server.admin_port, key="admin_port")
    if server.is_open_to_all:
        yield Finding.warn(
            f"[server] host = {server.host!r} without api_keys: every machine that reaches this one can use the server",
            "Set [server] api_keys, or listen on 127.0.0.1 behind a proxy that checks who asks.",
        )


def _check_port(host: str, port: int, *, key: str) -> Finding:
    if port == 0:
        return Finding.ok(f"[server] {key} = 0: any free port of {host}")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As servers do: a connection that has just ended does not count as use.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return Finding.warn(
                f"[server] {key} = {port}: another program listens on {host}:{port}",
                f"If it is not your own server: stop it, or choose another port with --server.{key.replace('_', '-')}.",
            )
        return Finding.fail(
            f"[server] {host}:{port} cannot be listened on: {error.strerror or error}",
            "Correct [server] host, or choose a port above 1023.",
        )
    return Finding.ok(f"[server] {key} = {port}: free on {host}")
