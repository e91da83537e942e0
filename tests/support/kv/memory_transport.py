"""A transport between engines of one process: what every transport must do, without a library."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from support.kv.p2p_ends import p2p_config
from trencadis.interfaces import ComponentContext, ConnectorPair
from trencadis_kv.connectors.p2p.connector import P2PScheduler
from trencadis_kv.connectors.p2p.node import Node
from trencadis_kv.connectors.p2p.transport import Flight, ReceiveBuffer, Transport
from trencadis_kv.connectors.p2p.worker import P2PWorker
from trencadis_kv.store.defaults import policy_of

__all__ = ["MemoryTransport"]

_LANDINGS: dict[int, MemoryLanding] = {}
_NUMBERS = itertools.count()


class MemoryLanding(ReceiveBuffer):
    """Two pieces of two rows."""

    via = "memory"
    num_pieces = 2

    def __init__(self, transport: MemoryTransport) -> None:
        self._transport = transport
        self._number = next(_NUMBERS)
        self.pieces: NDArray[np.uint8] = np.zeros((2, 2, transport.block_bytes), np.uint8)
        self.target = msgspec.msgpack.encode(self._number)
        _LANDINGS[self._number] = self

    def rows(self, index: int) -> NDArray[np.uint8]:
        rows: NDArray[np.uint8] = self.pieces[index]
        return rows

    def holds(self, index: int, num_rows: int) -> bool:
        return 0 <= index < 2 and num_rows <= 2

    def close(self) -> None:
        del _LANDINGS[self._number]
        self._transport.quiet.append(self.is_quiet)


class MemoryFlight(Flight):
    """A way to a receive buffer."""

    num_pieces = 2

    def __init__(self, transport: MemoryTransport, receive_buffer: MemoryLanding) -> None:
        self._transport = transport
        self._receive_buffer = receive_buffer
        self._rows = np.zeros_like(receive_buffer.pieces[0])

    def rows(self, index: int) -> NDArray[np.uint8]:
        return self._rows

    def write(self, index: int, num_rows: int, *, timeout_s: float, is_gone: Callable[[], bool]) -> None:
        self._transport.on_write(self._rows)
        self._receive_buffer.pieces[index, :num_rows] = self._rows[:num_rows]
        self._transport.written.append(num_rows)

    def close(self) -> None:
        self._transport.num_flights -= 1


class MemoryTransport(Transport):
    """Keeps books.

    Attributes:
        written: Rows of each write.
        quiet: Of each receive_buffer that was closed, whether its producer had said that it writes no more.
        num_flights: That are open.
        has_landings: Whether it lends memory.
        has_flights: Whether it has memory to write from.
        on_write: Called with the rows before each write.
    """

    name = "memory"

    def __init__(self) -> None:
        self.block_bytes = self.num_flights = 0
        self.written: list[int] = []
        self.quiet: list[bool] = []
        self.has_landings = self.has_flights = True
        self.on_write: Callable[[NDArray[np.uint8]], None] = lambda _: None

    def make(self, context: ComponentContext) -> ConnectorPair:
        """Return a connector of one engine, with this way for the bytes."""
        node = Node(p2p_config(), clock=context.clock, model="", transport=self)
        return ConnectorPair(scheduler=P2PScheduler(node, policy_of(context)), worker=P2PWorker(node))

    def open(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes

    def receive_buffer(self) -> ReceiveBuffer | None:
        return MemoryLanding(self) if self.has_landings else None

    def flight(self, target: bytes) -> Flight | None:
        if not self.has_flights:
            return None
        self.num_flights += 1
        return MemoryFlight(self, _LANDINGS[msgspec.msgpack.decode(target)])

    def close(self) -> None:
        """Nothing is held."""
