"""Socket buffers as large as one read, for fewer wake-ups of sender and reader."""

from __future__ import annotations

import contextlib
import functools
import socket
from typing import Final, Literal

__all__ = ["BUFFER_BYTES", "set_buffer"]

BUFFER_BYTES: Final = 4 << 20
"""Size of the buffer of a socket that blocks are read from or written to."""

_OPTIONS: Final = {"receive": socket.SO_RCVBUF, "send": socket.SO_SNDBUF}


def set_buffer(connection: socket.socket, way: Literal["receive", "send"]) -> None:
    """Set a connection's buffer to :data:`BUFFER_BYTES`, if the process may.

    Otherwise nothing is changed: the kernel enlarges a buffer by itself, up to some megabytes, but not one whose size
    was set.
    Source: ``SO_RCVBUF``, ``rmem_max`` in socket(7); ``tcp_rmem`` in tcp(7).

    Args:
        connection: Socket, before data arrive.
        way: Direction of the buffer.
    """
    if _may_have(way):
        with contextlib.suppress(OSError):  # best effort
            connection.setsockopt(socket.SOL_SOCKET, _OPTIONS[way], BUFFER_BYTES)


@functools.cache
def _may_have(way: Literal["receive", "send"]) -> bool:
    """Return whether the kernel allows a buffer of that size; tested on a spare socket, since limits cannot be read everywhere."""
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, _OPTIONS[way], BUFFER_BYTES)
            return probe.getsockopt(socket.SOL_SOCKET, _OPTIONS[way]) >= BUFFER_BYTES
    except OSError:
        return False
