"""State shared by both sides of the connector between engines: this engine as a peer."""

from __future__ import annotations

import uuid

from trencadis.clock import Clock
from trencadis.interfaces import SamplingFingerprint
from trencadis.records import KVLayout
from trencadis_kv.connectors.p2p.config import P2PConfig
from trencadis_kv.connectors.p2p.metrics import P2PMetrics
from trencadis_kv.connectors.p2p.peers import BackgroundCalls, Peers, PrefillPool
from trencadis_kv.connectors.p2p.remote_prefills import Holds, RemotePrefills
from trencadis_kv.connectors.p2p.server import BlockServer
from trencadis_kv.connectors.p2p.streaming import Pushes
from trencadis_kv.connectors.p2p.transport import Transport
from trencadis_kv.interfaces import KVCodec
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
        config: Table of the connector.
        clock: Source of time.
        model: Identity of the model.
        name: Name of the connector.
        transport: Transport of block bytes besides TCP; None: TCP only.
        codec: KV codec of blocks in transit; None: unencoded.

    Attributes:
        config: Table of the connector.
        transport: Transport of block bytes besides TCP; None: TCP only.
        engine: Random id of this engine, new in each process.
        holds: Blocks held for other engines.
        peers: Allowed engines and their failures.
        background_calls: Short calls to other engines.
        metrics: Metrics of the connector.
        cost: Estimates the time to compute tokens and to pull blocks.
        pace: Throttles pulls while the engine computes.
        remote_prefills: Prompts computed for other engines.
        pushes: Receives blocks that other engines push after their prefill responses.
        fingerprint: Sampling fingerprint of this engine; None: other engines choose no first tokens.
        prefill_pool: Engines that compute prompts for this one.
        server: Serves blocks to other engines.
        block_size: Tokens per block; 0 before :meth:`start`.
        block_bytes: Bytes per block; 0 before :meth:`start`.
        identity: Identity that this engine presents in handshakes; None before :meth:`start`.
        pool: Access to the blocks on the device; None until the worker side registers it.
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
            layout: KV layout of the device's blocks.

        Raises:
            ConfigValueError: The address or the port cannot be listened on.
        """
        # The codec is part of the identity: engines of different codecs refuse each other in the handshake, not block
        # by block.
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
