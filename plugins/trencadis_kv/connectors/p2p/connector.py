"""Connector ``p2p``: KV blocks from engine to engine; a prefill engine holds the blocks of a prefix, a decode engine pulls them.

Blocks go over TCP, and between engines of one machine through shared memory.

Prefill first: a router sends the request to a prefill engine with ``kv_transfer_params`` that ask for a remote decode,
and then to a decode engine with the parameters of the response. Decode first: the decode engine gets the request, and
sends the prompt to one of its ``prefill_engines``. After a failure the engine that has the request computes the prefix;
the failure costs the time until it is noticed.
"""

from __future__ import annotations

import itertools
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import attrs
import msgspec

from trencadis.interfaces import (
    ComponentContext,
    ConnectorPair,
    KVSchedulerSide,
    Lookup,
    SamplingFingerprint,
    SupportsHandover,
    SupportsLayerwise,
    SupportsMetrics,
    SupportsRemotePrefill,
    SupportsStepTimes,
)
from trencadis.records import ConnectorReport, FailedLoad, FirstToken, KVLayout, Request
from trencadis_kv.connectors.p2p.config import P2PConfig, check_hold, check_secret
from trencadis_kv.connectors.p2p.delegation import Delegation, Pending
from trencadis_kv.connectors.p2p.node import Node
from trencadis_kv.connectors.p2p.params import KeyCheck, RemotePrefix, handover_params, wants_hold
from trencadis_kv.connectors.p2p.transport import shared_memory
from trencadis_kv.connectors.p2p.worker import LoadOrder, P2PWorker, Work
from trencadis_kv.interfaces import KVPolicy
from trencadis_kv.store.bounded import BoundedDict
from trencadis_kv.store.defaults import codec_of, policy_of

__all__ = ["P2PScheduler", "make_p2p"]

logger = logging.getLogger("trencadis.kv.p2p")

_MAX_ENTRIES: Final = 4096
"""Most look-ups kept for requests that have not come back; aborted requests never do."""


def make_p2p(config: P2PConfig, context: ComponentContext) -> ConnectorPair:
    """Return the connector of one engine.

    Args:
        config: Table ``[kv_connector.p2p]``.
        context: Context of the component's factory, with the model's facts.

    Raises:
        ConfigValueError: Blocks would be held until the engine closes the connector, or there is no secret.
    """
    check_hold(config, context, name="p2p")
    check_secret(config, name="p2p")
    model = "" if context.model is None else context.model.identity
    transport = shared_memory(config.num_pull_threads) if config.shared_memory else None
    node = Node(config, clock=context.clock, model=model, transport=transport, codec=codec_of(context))
    return ConnectorPair(scheduler=P2PScheduler(node, policy_of(context)), worker=P2PWorker(node))


class P2PScheduler(
    KVSchedulerSide, SupportsHandover, SupportsRemotePrefill, SupportsLayerwise, SupportsStepTimes, SupportsMetrics
):
    """Holds the blocks of prefills for decode engines, and finds the prefixes that other engines hold.

    Args:
        node: State shared by both sides.
        policy: KV policy that chooses which prompts other engines compute; None: the default.
    """

    def __init__(self, node: Node, policy: KVPolicy | None = None) -> None:
        self._node = node
        self._delegation = Delegation(node, policy or KVPolicy())
        self._transfer_ids = itertools.count()
        self._hashes: BoundedDict[str, tuple[bytes, ...]] = BoundedDict(_MAX_ENTRIES)
        self._num_cached: BoundedDict[str, int] = BoundedDict(_MAX_ENTRIES)
        self._found: BoundedDict[int, tuple[RemotePrefix, str]] = BoundedDict(_MAX_ENTRIES)
        self._unused: BoundedDict[str, None] = BoundedDict(_MAX_ENTRIES)
        self._handover_params: dict[str, dict[str, Any]] = {}
        self._work = Work(loads=[], cancels=[])
        self._keys = KeyCheck()

    def on_ready(self, layout: KVLayout) -> None:
        """Start to listen for other engines.

        Raises:
            ConfigValueError: The address or the port cannot be listened on.
        """
        self._node.start(layout)

    def lookup(self, request: Request, *, block_hashes: Sequence[bytes], num_local_tokens: int) -> Lookup:
        """Answer from the request's transfer parameters, or delegate the prefill to another engine."""
        node, is_ours = self._node, False
        self._keys.look_at(request.transfer_params)
        prefix: RemotePrefix | Pending | None = RemotePrefix.of(request.transfer_params)
        if wants_hold(request.transfer_params):
            self._hashes[request.request_id] = tuple(block_hashes)
        elif prefix is None:
            is_ours = True
            prefix = self._delegation.find(request, block_hashes=block_hashes, num_local_tokens=num_local_tokens)
        if prefix is None:
            return Lookup()
        if isinstance(prefix, Pending):
            return Lookup(pending=True)
        if not is_ours and (not node.peers.allows(prefix.host, prefix.port) or node.peers.is_down(prefix)):
            node.metrics.looked_up("declined")
            return Lookup()
        found = self._hit(request.request_id, prefix, len(block_hashes), num_local_tokens)
        if is_ours and found.num_tokens:
            return attrs.evolve(found, first_token=self._delegation.take_token(request.request_id))
        return found

    def _hit(self, request_id: str, prefix: RemotePrefix, num_hashes: int, num_local_tokens: int) -> Lookup:
        node = self._node
        num_blocks = min(num_hashes, prefix.num_tokens // node.block_size)
        if num_blocks * self._node.block_size <= num_local_tokens:
            node.metrics.looked_up("miss")
            self._delegation.forget(request_id)
            self._unused.pop(request_id, None)
            node.background_calls.release(prefix)
            return Lookup()
        transfer_id = next(self._transfer_ids)
        self._found[transfer_id] = (prefix, request_id)
        return Lookup(
            num_tokens=num_blocks * self._node.block_size,
            transfer_id=transfer_id,
            timeout_s=node.config.pull_timeout_s + 1.0,
            layerwise=node.config.layerwise,
            num_cached_tokens=prefix.num_cached_tokens,
        )

    def on_allocated(self, transfer_id: int, *, blocks: Sequence[int], block_hashes: Sequence[bytes]) -> None:
        """Order the pull."""
        if not blocks:
            return
        prefix, request_id = self._found.pop(transfer_id)
        self._unused.pop(request_id, None)
        self._delegation.loading(request_id)
        # Hits are counted here: one for which no blocks are free is looked up again.
        self._node.metrics.looked_up("hit")
        order = LoadOrder(
            transfer_id=transfer_id,
            engine=prefix.engine,
            name=prefix.hold_id,
            host=prefix.host,
            port=prefix.port,
            lease_s=prefix.lease_s,
            blocks=list(blocks),
            hashes=list(block_hashes),
        )
        self._work.loads.append(order)

    def on_unused(self, transfer_id: int) -> None:
        """Drop the hit; the prefix stays held until the request is looked up again or ends."""
        if transfer_id in self._found:
            _, request_id = self._found.pop(transfer_id)
            self._unused[request_id] = None

    def on_layerwise(self, transfer_id: int) -> None:
        """Pull the blocks layer by layer."""
        for order in self._work.loads[-1:]:
            order.by_layer = order.transfer_id == transfer_id

    def on_computed(self, *, blocks: Sequence[int], block_hashes: Sequence[bytes]) -> None:
        """Do nothing: no blocks are saved."""

    def on_cache_hit(self, request: Request, *, num_tokens: int) -> None:
        """Keep the number of cached tokens for the engine that continues the request."""
        self._num_cached[request.request_id] = num_tokens

    def on_finished(self, request: Request, *, blocks: Sequence[int]) -> int | None:
        """Hold the blocks of a prefill that another engine continues."""
        self._delegation.forget(request.request_id)
        if request.request_id in self._unused:
            del self._unused[request.request_id]
            self.on_rejected(request.transfer_params or {})
        hashes, num_cached = self._hashes.pop(request.request_id, ()), self._num_cached.pop(request.request_id, 0)
        num_blocks = min(len(hashes), len(blocks))
        if not num_blocks or not wants_hold(request.transfer_params):
            return None
        node, name = self._node, uuid.uuid4().hex
        transfer_id = next(self._transfer_ids)
        index = dict(zip(hashes, blocks, strict=False))
        if not node.holds.add(transfer_id, name, index, num_bytes=num_blocks * self._node.block_bytes):
            return None
        host, port = node.address
        prefix = RemotePrefix(
            engine=node.engine,
            hold_id=name,
            host=host,
            port=port,
            num_tokens=num_blocks * self._node.block_size,
            lease_s=min(node.config.lease_s, node.config.max_hold_s),
            num_cached_tokens=num_cached,
        )
        self._handover_params[request.request_id] = handover_params(prefix, blocks=blocks[:num_blocks])
        return transfer_id

    def finished_params(self, request: Request) -> Mapping[str, Any] | None:
        """Return the transfer parameters of the blocks held for the request."""
        return self._handover_params.pop(request.request_id, None)

    def on_rejected(self, transfer_params: Mapping[str, Any]) -> None:
        """Release the prefix at the engine that holds it."""
        prefix = RemotePrefix.of(transfer_params)
        if prefix is not None and self._node.peers.allows(prefix.host, prefix.port):
            self._node.background_calls.release(prefix)

    def on_abandoned(self, request: Request) -> None:
        """Withdraw the prefill at the engine that computes it."""
        self._delegation.forget(request.request_id)
        self._unused.pop(request.request_id, None)

    def on_failed(self, request: Request, failed: FailedLoad) -> str:
        """Delegate the prefill once more after a failed pull, else compute."""
        return "retry" if self._delegation.can_retry(request.request_id) else "compute"

    def on_sampling(self, fingerprint: SamplingFingerprint) -> None:
        """Enable first tokens from prefill engines, in both directions."""
        if self._node.config.first_token:
            self._node.fingerprint = fingerprint
            self._node.remote_prefills.unpack = fingerprint.unpack

    def on_role(self, role: str) -> None:
        """Accept remote prefills unless the role is decode."""
        self._node.remote_prefills.accepts = role != "decode"
        if role == "decode" and not self._node.prefill_pool.engines:
            logger.warning(
                "The role of this engine is decode, and kv_connector.p2p.prefill_engines names none: prompts are computed here, unless "
                "a request says where its prefix is."
            )

    def on_waker(self, wake: Callable[[], None]) -> None:
        """Set the function that wakes the engine for a remote prefill."""
        self._node.remote_prefills.wake = wake

    def take_requests(self) -> Sequence[Request]:
        """Return new remote prefills."""
        return self._node.remote_prefills.take_new()

    def take_withdrawn(self) -> Sequence[str]:
        """Return the ids of withdrawn remote prefills."""
        return self._node.remote_prefills.take_withdrawn()

    def on_request_token(self, request_id: str, first: FirstToken) -> None:
        """Add the first token to the prefill response."""
        self._node.remote_prefills.set_token(request_id, first)

    def on_request_ended(self, request_id: str, *, transfer_params: Mapping[str, Any] | None, error: str) -> None:
        """Send the prefill response to the engine that delegated the prefill."""
        self._node.remote_prefills.ended(request_id, transfer_params, error)

    def on_backlog(self, num_tokens: int) -> None:
        """Set the number of queued tokens that is reported to other engines."""
        self._node.remote_prefills.num_backlog_tokens = num_tokens

    def on_step(self, *, num_tokens: int, device_s: float) -> None:
        """Update the cost model and the throttle of pulls."""
        self._node.cost.computed(num_tokens=num_tokens, seconds=device_s)
        self._node.pace.stepped(device_s=device_s)

    def on_cancelled(self, transfer_id: int) -> None:
        """Cancel a pull."""
        self._work.cancels.append(transfer_id)

    def take_message(self) -> bytes:
        """Return the pulls to start and to cancel."""
        if not self._work.loads and not self._work.cancels:
            return b""
        message = msgspec.msgpack.encode(self._work)
        self._work = Work(loads=[], cancels=[])
        return message

    def on_report(self, report: ConnectorReport) -> None:
        """Do nothing: the worker side updates the metrics."""

    def metrics(self) -> str:
        """Return the counters, in Prometheus' text format."""
        return self._node.metrics.text()

    def close(self) -> None:
        """Close all connections; may be called twice."""
        self._delegation.close()
        self._node.close()
