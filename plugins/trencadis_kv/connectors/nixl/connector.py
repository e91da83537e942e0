"""Connector ``nixl``: the connector ``p2p`` with NIXL as transport.

The producer writes; the consumer does not read: UCX ended a producer, with all requests that it served, when its
consumer vanished in the middle of a read.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import attrs
import msgspec

from trencadis.errors import ConfigError, TransferError
from trencadis.interfaces import ComponentContext, ConnectorPair
from trencadis.records import TransferCause
from trencadis_kv.connectors.nixl.agent import NixlAgent, check_package, tell_ucx
from trencadis_kv.connectors.nixl.config import NixlConfig
from trencadis_kv.connectors.p2p.config import check_hold, check_secret
from trencadis_kv.connectors.p2p.connector import P2PScheduler
from trencadis_kv.connectors.p2p.node import Node
from trencadis_kv.connectors.p2p.transport import Flight, ReceiveBuffer, Transport
from trencadis_kv.connectors.p2p.worker import P2PWorker
from trencadis_kv.store.defaults import codec_of, policy_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["NixlTransport", "make_nixl"]

logger = logging.getLogger("trencadis.kv.nixl")

_NUM_LENT: Final = 2
"""Pieces that a pull lends: one is written to while the other is verified."""
_LOST_RATIO: Final = 0.25
"""Share of an agent's memory that may be lost before the agent is replaced."""


class _Target(msgspec.Struct, array_like=True):
    """Address of a receive buffer."""

    metadata: bytes
    addresses: list[int]
    num_rows: int
    block_bytes: int


class NixlTransport(Transport):
    """Agents of one engine: the present one, and older ones whose memory is still in use.

    Args:
        config: Table ``[kv_connector.nixl]``.
    """

    name = "nixl"

    def __init__(self, config: NixlConfig) -> None:
        self._config = config
        self._library: Any = check_package()
        self._lock = threading.Lock()
        self._agent: NixlAgent | None = None
        self._block_bytes = 0
        self._is_closed = False

    def open(self, block_bytes: int) -> None:
        """Start an agent.

        Raises:
            ConfigError: NIXL does not start.
        """
        self._block_bytes = block_bytes
        tell_ucx(self._config)
        try:
            self._agent = self._start()
        except Exception as error:  # exceptions of many classes of the library's own
            raise ConfigError(
                f"kv_connector.name = 'nixl': NIXL does not start: {error}.",
                hint="Correct kv_connector.nixl.transports and devices, and the variables UCX_* of the environment.",
            ) from error

    def receive_buffer(self) -> ReceiveBuffer | None:
        """Return a receive buffer for a pull."""
        with self._lock:
            agent = self._agent
            pieces = [] if agent is None else agent.take(_NUM_LENT)
            if agent is None or not pieces:
                return None
            agent.num_users += 1
        return _NixlReceiveBuffer(self, agent, pieces)

    def flight(self, target: bytes) -> Flight | None:
        """Return a flight to a receive buffer; None while no piece is free."""
        try:
            found = msgspec.msgpack.decode(target, type=_Target)
        except msgspec.MsgspecError as error:
            raise TransferError(f"A receive_buffer cannot be read: {error}.", cause=TransferCause.CORRUPT) from None
        if found.block_bytes != self._block_bytes or found.num_rows < 1 or not found.addresses:
            raise TransferError("A receive_buffer is for blocks of another kind.", cause=TransferCause.CORRUPT)
        with self._lock:
            agent = self._agent
            pieces = [] if agent is None else agent.take(1)
            if agent is None or not pieces:
                return None
            agent.num_users += 1
        return _NixlFlight(self, agent, pieces[0], found)

    def close(self) -> None:
        """Close the agent, now or with its last user."""
        with self._lock:
            self._is_closed = True
            agent, self._agent = self._agent, None
            is_idle = agent is not None and not agent.num_users
        if agent is not None and is_idle:
            agent.close()

    def left(self, agent: NixlAgent, *, num_lost: int = 0) -> None:
        """Called when a user of an agent is done with it.

        Args:
            agent: Agent that the user has left.
            num_lost: Pieces that a producer may still write to.
        """
        with self._lock:
            agent.num_users -= 1
            agent.num_lost += num_lost
            if agent is self._agent and agent.num_lost > _LOST_RATIO * agent.num_pieces:
                self._agent = None
                threading.Thread(target=self._replace, name="trencadis-nixl-agent", daemon=True).start()
            is_over = agent is not self._agent and not agent.num_users
        if is_over:
            agent.close()

    def _start(self) -> NixlAgent:
        config = self._config
        return NixlAgent(
            self._library,
            num_pieces=config.num_pieces,
            num_rows=max(1, config.piece_bytes // self._block_bytes),
            block_bytes=self._block_bytes,
        )

    def _replace(self) -> None:
        """Start another agent; until it runs, blocks go over the TCP connections."""
        logger.warning("Engines that were pulled from may still write to this one's memory: NIXL is started anew.")
        try:
            agent = self._start()
        except Exception:
            logger.exception("NIXL does not start any more: blocks go over TCP from now on.")
            return
        with self._lock:
            is_wanted = not self._is_closed
            if is_wanted:
                self._agent = agent
        if not is_wanted:
            agent.close()


class _NixlReceiveBuffer(ReceiveBuffer):
    """Two pieces of an agent's memory."""

    via = NixlTransport.name

    def __init__(self, transport: NixlTransport, agent: NixlAgent, pieces: list[int]) -> None:
        self._transport = transport
        self._agent = agent
        self._pieces = pieces
        self.num_pieces = len(pieces)
        self._is_closed = False
        agent.pump.begin()
        num_rows, block_bytes = agent.rows(pieces[0]).shape
        addresses = [agent.address(piece) for piece in pieces]
        self.target = msgspec.msgpack.encode(_Target(agent.metadata, addresses, num_rows, block_bytes))

    def rows(self, index: int) -> NDArray[np.uint8]:
        """Return a piece."""
        return self._agent.rows(self._pieces[index])

    def holds(self, index: int, num_rows: int) -> bool:
        """Return whether there is such a piece."""
        return 0 <= index < len(self._pieces) and num_rows <= len(self.rows(index))

    def close(self) -> None:
        """Free the pieces, or leave them to the end of their agent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._agent.pump.end()
        if self.is_quiet:
            self._agent.give_back(self._pieces)
        self._transport.left(self._agent, num_lost=0 if self.is_quiet else len(self._pieces))


class _NixlFlight(Flight):
    """One piece of an agent's memory, and its remote target."""

    def __init__(self, transport: NixlTransport, agent: NixlAgent, piece: int, target: _Target) -> None:
        self._transport = transport
        self._agent = agent
        self._piece = piece
        self._target = target
        self._is_ours = True
        rows = agent.rows(piece)
        self._rows = rows[: min(len(rows), target.num_rows)]
        self.num_pieces = len(target.addresses)

    def rows(self, index: int) -> NDArray[np.uint8]:
        """Return the local piece, the same for every remote one: it is free again when a write returns."""
        return self._rows

    def write(self, index: int, num_rows: int, *, timeout_s: float, is_gone: Callable[[], bool]) -> None:
        """Write leading rows to a piece."""
        if not 0 <= index < self.num_pieces:
            raise TransferError(f"There is no piece {index}.", cause=TransferCause.CORRUPT)
        try:
            self._agent.write(
                self._piece,
                num_rows * self._rows.shape[1],
                metadata=self._target.metadata,
                address=self._target.addresses[index],
                timeout_s=timeout_s,
                is_gone=is_gone,
            )
        except TransferError:
            self._is_ours = False  # the agent frees the piece once nothing reads it
            raise

    def close(self) -> None:
        """Free the piece."""
        if self._is_ours:
            self._agent.give_back([self._piece])
        self._transport.left(self._agent)


def make_nixl(config: NixlConfig, context: ComponentContext) -> ConnectorPair:
    """Return the connector of one engine.

    Args:
        config: Table ``[kv_connector.nixl]``.
        context: Context of the component's factory, with the model's facts.

    Raises:
        ConfigError: The package nixl is missing.
        ConfigValueError: Blocks would be held until the engine closes the connector, or there is no secret.
    """
    check_hold(config, context, name="nixl")
    check_secret(config, name="nixl")
    model = "" if context.model is None else context.model.identity
    transport = NixlTransport(config)
    config = attrs.evolve(config, max_pushed_bytes=0)  # no push: pushed blocks would go over the TCP connection
    node = Node(config, clock=context.clock, model=model, name="nixl", transport=transport, codec=codec_of(context))
    return ConnectorPair(scheduler=P2PScheduler(node, policy_of(context)), worker=P2PWorker(node))
