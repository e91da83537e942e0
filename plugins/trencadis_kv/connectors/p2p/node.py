"""State shared by both sides of the connector between engines: this engine as a peer."""

from __future__ import annotations

import uuid

from trencadis.clock import Clock
from trencadis.interfaces import KVCodec, SamplingFingerprint
from trencadis.records import KVLayout
from trencadis_kv.connectors.p2p.config import P2PConfig
from trencadis_kv.connectors.p2p.metrics import P2PMetrics
from trencadis_kv.connectors.p2p.peers import BackgroundCalls, Peers, PrefillPool
from trencadis_kv.connectors.p2p.remote_prefills import Holds, RemotePrefills
from trencadis_kv.connectors.p2p.server import BlockServer
from trencadis_kv.connectors.p2p.streaming import Pushes
from trencadis_kv.connectors.p2p.transport import Transport
from trencadis_kv.store.cost import CostModel
from trencadis_kv.store.defaults import IdentityCodec
from trencadis_kv.store.identity import compat_id
from trencadis_kv.store.pace import Pace
from trencadis_kv.store.pool_access import PoolAccess
from trencadis_kv.wire.handshake import Identity

__all__ = ["Node"]


class Node:
    """One engine as a peer of others. Both sides run in one process, with one rank.

    Args:
        config: The connector's.
        clock: Source of time.
        model: Identity of the model.
        name: Of the connector.
        transport: Another way for the bytes of blocks than TCP.
        codec: In which form blocks travel; None: as they are.

    Attributes:
        config: As given.
        transport: As given.
        engine: Its id, of this one process.
        holds: Blocks kept for others.
        peers: What is known of others.
        background_calls: Short calls to other engines.
        metrics: What is counted.
        cost: What computing and pulling take here.
        pace: When pulls give way to steps.
        remote_prefills: Prompts that are computed for others.
        pushes: Blocks that other engines send along with their prefill responses.
        fingerprint: Of sampling here; None: first tokens are not chosen by other engines.
        registry: Engines that compute prompts for this one.
        server: Gives blocks to others.
        block_size: Tokens of a block; 0 before :meth:`start`.
        block_bytes: Bytes of a block; 0 before :meth:`start`.
        identity: What it says of itself; None before :meth:`start`.
        pool: The device's blocks; None before the worker side has them.
    """

    def __init__(
        self,
        config: P2PConfig,
        *,
        clock: Clock,
        model: str,
        name: str = "p2p",
        transport: Transport | None = None,
        codec: KVCodec | None = None,
    ) -> None:
        self.config = config
        self._codec = codec or IdentityCodec()
        self.transport = transport
        self.engine = uuid.uuid4().hex
        self.holds = Holds(
            clock,
            lease_s=min(config.lease_s, config.max_hold_s),
            max_hold_s=config.max_hold_s,
            max_bytes=config.max_held_bytes,
        )
        named = (*config.peers, *config.prefill_engines)
        self.peers = Peers(named, clock, retry_s=config.retry_s, name=name)
        self.background_calls = BackgroundCalls(self.peers, connect_timeout_s=config.connect_timeout_s)
        self.metrics = P2PMetrics(self.holds, self.peers, name=name)
        self.cost = CostModel(clock)
        self.pace = Pace(config.load_share, cost=self.cost, clock=clock)
        self.remote_prefills = RemotePrefills(config.max_remote_prefills, release=self.holds.release)
        self.metrics.watch_remote_prefills(lambda: self.remote_prefills.num_remote_prefills)
        self.pushes = Pushes(_room(config))
        self.metrics.watch_push_bytes(lambda: self.pushes.num_bytes)
        self.fingerprint: SamplingFingerprint | None = None
        self.prefill_pool = PrefillPool(
            config.prefill_engines, connect_timeout_s=config.connect_timeout_s, heartbeat_s=config.heartbeat_s
        )
        self.metrics.watch_engines(lambda: len(self.prefill_pool.ready()))
        self.server = BlockServer(
            config, self.holds, self.metrics, remote_prefills=self.remote_prefills, cost=self.cost, transport=transport
        )
        self.block_size = self.block_bytes = 0
        self.identity: Identity | None = None
        self.pool: PoolAccess | None = None
        self._model = model

    def start(self, layout: KVLayout) -> None:
        """Listen for other engines.

        Args:
            layout: Of the blocks.

        Raises:
            ConfigValueError: The address or the port cannot be listened on.
        """
        # Engines of different codecs are told so when they meet, not block by block.
        model = f"{self._model}\0codec {self._codec.flags}" if self._codec.flags else self._model
        self.identity = self.background_calls.identity = Identity(
            engine=self.engine,
            compat=compat_id(layout, identity=model, exact_numerics=self.config.numerics == "exact"),
            block_bytes=layout.block_bytes,
            secret=self.config.secret,
            codec=self._codec,
        )
        self.block_size, self.block_bytes = layout.block_size, layout.block_bytes
        if self.transport is not None:
            self.transport.open(layout.block_bytes)
        self.server.start(self.identity, lambda: self.pool)
        self.prefill_pool.start(self.identity)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that other engines reach this one by."""
        return self.config.advertised_host or self.config.host, self.server.port

    def close(self) -> None:
        """Close all connections; may be called twice."""
        self.remote_prefills.close()
        self.pushes.close()
        self.server.close()
        self.prefill_pool.close()
        self.background_calls.close()
        if self.transport is not None:
            self.transport.close()


def _room(config: P2PConfig) -> int:
    """Return the bytes for pushed blocks: none with layer-wise pulls. Pure."""
    return config.max_pushed_bytes if config.push and not config.layerwise else 0
