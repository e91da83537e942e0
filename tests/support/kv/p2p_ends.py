"""One producer with blocks in its hands, and what a consumer needs to ask for them; no engines."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from trencadis.clock import SimulatedClock
from trencadis_kv.connectors.p2p.config import P2PConfig
from trencadis_kv.connectors.p2p.node import Node
from trencadis_kv.connectors.p2p.params import RemotePrefix
from trencadis_kv.connectors.p2p.peer import PeerConnection
from trencadis_kv.connectors.p2p.transport import Transport
from trencadis_kv.interfaces import KVCodec
from trencadis_kv.store.pool_access import PoolAccess
from trencadis_kv.wire.handshake import Identity
from trencadis_kv.wire.stream import FrameStream
from trencadis_testing.connector_harness import hashes_of
from trencadis_testing.fake_pool import FakeKVCache

__all__ = ["HASHES", "LOOPBACK_PEERS", "NUM_BLOCKS", "SECRET", "Producer", "p2p_config", "producing"]

SECRET = "known to all engines of tests"
LOOPBACK_PEERS = ("127.0.0.0/8:*",)

NUM_BLOCKS = 6
HASHES = hashes_of(range(NUM_BLOCKS))


def p2p_config(**fields: Any) -> P2PConfig:
    """Return a configuration with a secret, under which blocks are pulled from every port of this machine."""
    return P2PConfig(**{"secret": SECRET, "peers": LOOPBACK_PEERS, **fields})


@attrs.frozen(eq=False)
class Producer:
    """A node that holds blocks under the name ``held``: block i has hash i.

    Attributes:
        node: Of the producer.
        clock: Its clock.
        data: Of its pool, ``[blocks, block bytes]``.
        prefix: Where it is.
        me: Identity of a consumer that it likes.
    """

    node: Node
    clock: SimulatedClock
    data: NDArray[np.uint8]
    prefix: RemotePrefix
    me: Identity

    def connect(self, **changes: Any) -> PeerConnection:
        return PeerConnection(attrs.evolve(self.prefix, **changes), self.me, connect_timeout_s=5.0)

    def pull(self, hashes: list[bytes], *, num_rows: int = 4, **changes: Any) -> NDArray[np.uint8]:
        rows: list[NDArray[np.uint8]] = []
        with self.connect(**changes) as connection:
            connection.pull(hashes, lambda _, some: rows.append(some.copy()), num_rows=num_rows, timeout_s=5.0)
        return np.concatenate(rows) if rows else np.empty((0, self.data.shape[1]), np.uint8)

    def raw(self) -> tuple[socket.socket, FrameStream]:
        connection = socket.create_connection(("127.0.0.1", self.node.server.port))
        return connection, FrameStream(connection, timeout_s=5.0)


@contextlib.contextmanager
def producing(*, codec: KVCodec | None = None, transport: Transport | None = None, **config: Any) -> Iterator[Producer]:
    clock = SimulatedClock()
    node = Node(p2p_config(**config), clock=clock, model="m", codec=codec, transport=transport)
    array = np.random.default_rng(0).integers(0, 2**60, NUM_BLOCKS * 4)
    pool = FakeKVCache([array], block_size=4)
    node.pool = PoolAccess(pool)
    node.start(pool.layout)
    node.holds.add(1, "held", dict(zip(HASHES, range(NUM_BLOCKS), strict=True)), num_bytes=NUM_BLOCKS * 32)
    prefix = RemotePrefix(
        engine=node.engine,
        hold_id="held",
        host="127.0.0.1",
        port=node.server.port,
        num_tokens=NUM_BLOCKS * 4,
        lease_s=30.0,
    )
    assert node.identity is not None
    try:
        yield Producer(node, clock, array.view(np.uint8).reshape(NUM_BLOCKS, 32), prefix, node.identity)
    finally:
        node.close()
