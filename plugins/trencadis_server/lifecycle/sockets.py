"""Sockets to listen on, bound before anything slow begins: a port in use is known at once, and said in words."""

from __future__ import annotations

import errno
import os
import socket

from trencadis.errors import ConfigError

__all__ = ["listen", "url_of"]

_BACKLOG = 2048


def listen(
    host: str, port: int, *, setting: str = "server.port", meaning_of_zero: str = "any free one"
) -> socket.socket:
    """Return a socket that listens.

    Args:
        host: Name or address.
        port: Port; 0: any free one.
        setting: The setting after the port, for messages.
        meaning_of_zero: What the setting 0 stands for, for messages.

    Raises:
        ConfigError: The address does not exist, or the port is in use or forbidden.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(
            f'[server] host = "{host}": no such address: {error.strerror or error}.', hint="Write 127.0.0.1 or 0.0.0.0."
        ) from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(
                f'[server] host = "{host}": this machine does not have that address.',
                hint="Correct server.host: 127.0.0.1, 0.0.0.0, or an address of this machine.",
            ) from error
        raise ConfigError(
            f"{setting} = {port}: {_reason(error, host)}", hint=f"Choose another {setting}; 0: {meaning_of_zero}."
        ) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the address of a listening socket as clients write it. Pure."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _reason(error: OSError, host: str) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return f"the port is in use on {host}."
        case errno.EACCES:
            return "this user may not listen on it."
        case _:
            return f"cannot listen on it: {os.strerror(error.errno or 0)}."
