"""Messages between an engine and a rank: :class:`trencadis.link.Link` with a head.

kind (1 byte)   number (8 bytes)   payload
"""

from __future__ import annotations

import enum
import struct
from typing import Final

from trencadis.link import Link

__all__ = ["Kind", "receive_messages", "send_message"]

_HEAD: Final = struct.Struct("<BQ")


class Kind(enum.IntEnum):
    """What a message is."""

    CALL = 0
    """Name and arguments of a method; answered by ``RESULT`` or ``ERROR`` with the same number."""
    BATCH = 1
    """A step; answered by ``OUTPUT`` or ``ERROR``, of ranks without an output only if they have something to report."""
    RESULT = 2
    OUTPUT = 3
    ERROR = 4
    PROGRESS = 5
    """Numbers of buckets that are prepared and of all, while a ``CALL`` runs."""
    BEAT = 6
    """Sent every second by ranks on other machines while they have something to answer."""


def send_message(link: Link, kind: Kind, number: int, payload: bytes = b"") -> None:
    """Send a message; see :meth:`Link.send`."""
    link.send(_HEAD.pack(kind, number), payload)


def receive_messages(link: Link) -> list[tuple[Kind, int, memoryview]]:
    """Return the messages that have come whole; see :meth:`Link.receive`."""
    return [_split(message) for message in link.receive()]


def _split(message: bytes) -> tuple[Kind, int, memoryview]:
    kind, number = _HEAD.unpack_from(message)
    return Kind(kind), number, memoryview(message)[_HEAD.size :]
