"""Both sides of the connector ``simulated_store``.

It has the knowledge of a real connector: look-ups see blocks that have arrived in the store, the KV policy decides from the times of
past loads and steps, and a save is decided when its blocks are computed. Transfers belong to :class:`StoreLink`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import attrs

from trencadis.clock import Clock
from trencadis.errors import ConfigValueError
from trencadis.interfaces import ComponentContext, ConnectorPair, KVPool, KVSchedulerSide, KVWorkerSide, Lookup
from trencadis.records import ConnectorReport, Request
from trencadis_kv.interfaces import KVPolicy, LoadView, SaveView
from trencadis_kv.store.cost import CostModel
from trencadis_kv.store.defaults import policy_of
from trencadis_kv.store.messages import LoadOrder, SaveOrder, StepOrders, decode_orders, encode_orders
from trencadis_tools.simulated_store.config import SimulatedStoreConfig
from trencadis_tools.simulated_store.pool import SimulatedPool
from trencadis_tools.simulated_store.store import KVTraffic, StoreLink

__all__ = ["make_simulated_store"]


@attrs.define(eq=False)
class _Shared:
    """State shared by both sides.

    Attributes:
        config: Table of the connector.
        clock: Clock of the engine.
        policy: KV policy, which decides about loads and saves.
        cost: Prediction of load and prefill times from past ones.
        link: Link of the replica; set when the worker side is registered, before any look-up.
        block_size: Tokens of a block; set when the worker side is registered.
        block_bytes: Bytes of a block; set when the worker side is registered.
        load_timeout_s: Time after which the engine gives a load up, seconds.
        traffic: Counters of the run.
    """

    config: SimulatedStoreConfig
    clock: Clock
    policy: KVPolicy
    cost: CostModel
    link: StoreLink | None = None
    block_size: int = 0
    block_bytes: int = 0
    load_timeout_s: float = 0.0
    traffic: KVTraffic = attrs.Factory(KVTraffic)


class SimulatedSchedulerSide(KVSchedulerSide):
    """Looks up and decides; see :class:`KVSchedulerSide`."""

    def __init__(self, shared: _Shared) -> None:
        self._shared = shared
        self._transfer_ids = itertools.count()
        self._waits_s: dict[int, float] = {}
        self._computed: list[SaveOrder] = []
        self._loads: list[LoadOrder] = []
        self._cancels: list[int] = []

    def lookup(self, request: Request, *, block_hashes: Sequence[bytes], num_local_tokens: int) -> Lookup:
        """Return the blocks that the store has after the local hit, if the policy admits the load."""
        shared, link = self._shared, self._shared.link
        assert link is not None, "the worker side was registered before"
        first = num_local_tokens // shared.block_size
        num_found = link.store.num_found(block_hashes[first:], now_s=shared.clock.now_s())
        if not num_found:
            return Lookup()
        num_tokens, num_bytes = num_found * shared.block_size, num_found * shared.block_bytes
        wait_s = shared.policy.admits_load(
            LoadView(
                request=request,
                num_tokens=num_tokens,
                num_local_tokens=num_local_tokens,
                num_bytes=num_bytes,
                load_s=shared.cost.load_s(num_bytes, call_bytes=num_bytes),
                compute_s=shared.cost.compute_s(num_tokens),
                timeout_s=shared.load_timeout_s,
            )
        )
        if not wait_s > 0.0:  # nan declines as well
            shared.traffic.num_declined_loads += 1
            return Lookup()
        transfer_id = next(self._transfer_ids)
        self._waits_s[transfer_id] = wait_s
        return Lookup(num_tokens=first * shared.block_size + num_tokens, transfer_id=transfer_id, timeout_s=wait_s)

    def on_allocated(self, transfer_id: int, *, blocks: Sequence[int], block_hashes: Sequence[bytes]) -> None:
        """Add the load to the message."""
        wait_s = self._waits_s.pop(transfer_id)
        self._loads.append(LoadOrder(transfer_id, list(blocks), list(block_hashes), wait_s))

    def on_unused(self, transfer_id: int) -> None:
        """Discard the hit."""
        del self._waits_s[transfer_id]

    def on_computed(self, *, blocks: Sequence[int], block_hashes: Sequence[bytes]) -> None:
        """Keep the blocks for the next message, when the store's content, also from other replicas, is known."""
        self._computed.append(SaveOrder(list(blocks), list(block_hashes)))

    def on_finished(self, request: Request, *, blocks: Sequence[int]) -> int | None:
        """Pin no blocks, since saves are copied."""
        return None

    def on_cancelled(self, transfer_id: int) -> None:
        """Add the cancellation to the message."""
        self._cancels.append(transfer_id)

    def take_message(self) -> bytes:
        """Return loads, cancellations, and the blocks to save: admitted by the policy and not in the store."""
        if not (self._computed or self._loads or self._cancels):
            return b""
        saves = [kept for one in self._computed if (kept := self._admitted(one)) is not None]
        orders = StepOrders(loads=self._loads, saves=saves, cancels=self._cancels)
        self._computed, self._loads, self._cancels = [], [], []
        return encode_orders(orders) if orders.loads or saves or orders.cancels else b""

    def on_report(self, report: ConnectorReport) -> None:
        """Do nothing: no state is kept for loads in flight."""

    def _admitted(self, computed: SaveOrder) -> SaveOrder | None:
        shared, link = self._shared, self._shared.link
        assert link is not None, "the worker side was registered before"
        places = [i for i, one in enumerate(computed.hashes) if one not in link.store]
        if not places:
            return None
        staged = link.staged_bytes(shared.clock.now_s()) / shared.config.staging_bytes
        view = SaveView(
            num_blocks=len(places), num_bytes=len(places) * shared.block_bytes, staged_fraction=min(1.0, staged)
        )
        kept = places[: shared.policy.admits_save(view)]
        shared.traffic.num_tokens_dropped += (len(places) - len(kept)) * shared.block_size
        return SaveOrder([computed.blocks[i] for i in kept], [computed.hashes[i] for i in kept]) if kept else None


class SimulatedWorkerSide(KVWorkerSide):
    """Begins transfers and reports their ends; see :class:`KVWorkerSide`."""

    def __init__(self, shared: _Shared) -> None:
        self._shared = shared

    def register(self, kv_cache: KVPool) -> None:
        """Request a link from the run.

        Raises:
            ConfigValueError: The device is not simulated, or a store has no room for a block.
        """
        if not isinstance(kv_cache, SimulatedPool):
            raise ConfigValueError(
                '[kv_connector] name = "simulated_store": it describes a store for trencadis simulate, compare and tune, and moves no '
                "blocks of a real engine.",
                hint='Choose the connector of your store, such as "host_offload" or "redis", or "none".',
            )
        shared, layout = self._shared, kv_cache.layout
        if shared.config.capacity_bytes < layout.block_bytes:
            raise ConfigValueError(
                f"[kv_connector.simulated_store] capacity_bytes = {shared.config.capacity_bytes}: a block of {layout.block_size} tokens "
                f"takes {layout.block_bytes}.",
                hint="Raise it, or lower cache.block_size.",
            )
        shared.block_size, shared.block_bytes = layout.block_size, layout.block_bytes
        shared.load_timeout_s = kv_cache.load_timeout_s
        shared.traffic = kv_cache.stores.traffic
        shared.link = kv_cache.link = kv_cache.stores.link(
            shared.config, block_size=layout.block_size, block_bytes=layout.block_bytes
        )
        kv_cache.cost = shared.cost

    def begin_step(self, message: bytes) -> None:
        """Begin the transfers in the message."""
        link, now_s = self._shared.link, self._shared.clock.now_s()
        assert link is not None, "it was registered before"
        if not message or link.is_closed:
            return
        orders = decode_orders(message)
        for transfer_id in orders.cancels:
            link.cancel(transfer_id)
        for save in orders.saves:
            link.save(save.hashes, now_s=now_s)
        for load in orders.loads:
            link.load(load.transfer_id, load.hashes, now_s=now_s, wait_s=load.wait_s)

    def end_step(self) -> None:
        """Do nothing: saves need no copy."""

    def poll(self) -> ConnectorReport:
        """Return the transfers that have ended, and add their times to the predictions."""
        link, cost, block_bytes = self._shared.link, self._shared.cost, self._shared.block_bytes
        assert link is not None, "it was registered before"
        report, loads = link.ended(self._shared.clock.now_s())
        for load in loads:
            measured = cost.loaded if load.num_valid_blocks == load.num_blocks else cost.gave_up
            measured(num_bytes=load.num_blocks * block_bytes, seconds=load.end_s - load.began_s)
        return report

    def close(self) -> None:
        """Do nothing: there are no threads or connections."""


def make_simulated_store(config: SimulatedStoreConfig, context: ComponentContext) -> ConnectorPair:
    """Return the connector of one replica.

    Args:
        config: Table of the connector.
        context: Context of the component, which makes the KV policy.
    """
    shared = _Shared(config, context.clock, policy_of(context), CostModel(context.clock))
    return ConnectorPair(scheduler=SimulatedSchedulerSide(shared), worker=SimulatedWorkerSide(shared))
