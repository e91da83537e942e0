"""Buffers of sockets that carry blocks, as large as one read: the fewer times a sender waits for a reader, the less both have to wake up."""

from __future__ import annotations

import contextlib
import functools
import socket
from typing import Final, Literal

__all__ = ["BUFFER_BYTES", "set_buffer"]

BUFFER_BYTES: Final = 4 << 20
"""Of a socket that blocks are read from or written to."""

_OPTIONS: Final = {"receive": socket.SO_RCVBUF, "send": socket.SO_SNDBUF}


def set_buffer(connection: socket.socket, way: Literal["receive", "send"]) -> None:
    """Have the kernel hold :data:`BUFFER_BYTES` for a connection, where a process may ask for as much.

    Where it may not, nothing is done: the kernel makes a buffer larger by itself, up to some megabytes, but none that somebody has set.
    Source: ``SO_RCVBUF``, ``rmem_max`` in socket(7); ``tcp_rmem`` in tcp(7).

    Args:
        connection: Before data comes.
        way: The direction whose buffer it is.
    """
    if _may_have(way):
        with contextlib.suppress(OSError):  # a wish
            connection.setsockopt(socket.SOL_SOCKET, _OPTIONS[way], BUFFER_BYTES)


@functools.cache
def _may_have(way: Literal["receive", "send"]) -> bool:
    """Return whether the kernel gives a socket as much; found out on one that is not used, for the limits cannot be read everywhere."""
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, _OPTIONS[way], BUFFER_BYTES)
            return probe.getsockopt(socket.SOL_SOCKET, _OPTIONS[way]) >= BUFFER_BYTES
    except OSError:
        return False
