"""Scheduler side of the tiered connector: looks up in all children, loads the longest prefix, saves to all."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import attrs
import msgspec

from trencadis.clock import Clock
from trencadis.interfaces import (
    KVSchedulerSide,
    Lookup,
    SamplingFingerprint,
    SupportsHandover,
    SupportsMetrics,
    SupportsRemotePrefill,
    SupportsRemoteWorkers,
    SupportsStepTimes,
)
from trencadis.records import ConnectorReport, FailedLoad, FirstToken, KVLayout, Request
from trencadis_kv.connectors.tiered.child import CLOSED, Child, TierCounters, merged
from trencadis_kv.connectors.tiered.config import TieredConfig
from trencadis_kv.connectors.tiered.worker import Hold, Orders, TransferIds
from trencadis_kv.interfaces import KVPolicy, SourceView
from trencadis_kv.store.bounded import BoundedDict
from trencadis_kv.store.cost import CostModel

__all__ = ["RemotePrefillScheduler", "TierLookups", "TieredScheduler"]

_MAX_OPEN = 4096
"""Most look-ups in flight: those of aborted requests are never continued, and the oldest are evicted."""


@attrs.define
class _Asked:
    last_hash: bytes
    since_s: float
    children: tuple[int, ...]
    answers: dict[int, Lookup] = attrs.field(factory=dict)


class TierLookups:
    """Look-ups in flight.

    Args:
        children: Children, the nearest first.
        clock: The engine's clock.
        timeout_s: Seconds after which a pending child is left out.
    """

    def __init__(self, children: Sequence[Child], *, clock: Clock, timeout_s: float) -> None:
        self._children = children
        self._clock = clock
        self._timeout_s = timeout_s
        self._open: BoundedDict[str, _Asked] = BoundedDict(_MAX_OPEN)

    def find(
        self,
        request: Request,
        *,
        block_hashes: Sequence[bytes],
        num_local_tokens: int,
        num_tokens: int,
        without: Collection[int],
    ) -> list[tuple[int, Lookup]] | None:
        """Return the children with hits beyond the local hit, and these hits, the nearest first; None while pending.

        All children are asked at once; when one has all tokens, later ones are not waited for. A child whose hit is not
        returned is notified.

        Args:
            request: Request whose prompt is looked up.
            block_hashes: Hashes of the prompt's full blocks.
            num_local_tokens: Tokens of the local prefix hit.
            num_tokens: Tokens of all full blocks.
            without: Indexes of children that are not asked.
        """
        asked = self._asked(request.request_id, block_hashes[-1] if block_hashes else b"", without)
        is_overdue = self._clock.now_s() - asked.since_s >= self._timeout_s
        is_waiting = False
        for child in asked.children:
            if child not in asked.answers:
                found = self._children[child].lookup(
                    request, block_hashes=block_hashes, num_local_tokens=num_local_tokens
                )
                if found.pending and is_overdue:
                    self._children[child].timed_out()
                    found = Lookup()
                if found.pending:
                    is_waiting = True
                    continue
                asked.answers[child] = found
            if not is_waiting and num_tokens and asked.answers[child].num_tokens >= num_tokens:
                break
        if is_waiting:
            self._open[request.request_id] = asked
            return None
        self._open.pop(request.request_id, None)
        self._unused(asked, num_local_tokens=num_local_tokens)
        return [(child, found) for child, found in sorted(asked.answers.items()) if found.num_tokens > num_local_tokens]

    def forget(self, request_id: str) -> None:
        """Remove a request that will not be looked up again."""
        asked = self._open.pop(request_id, None)
        if asked is not None:
            self._unused(asked)

    def _unused(self, asked: _Asked, *, num_local_tokens: int | None = None) -> None:
        """Notify children that their hits are not used: all, or those not longer than the local hit."""
        for child, found in asked.answers.items():
            if found.num_tokens and (num_local_tokens is None or found.num_tokens <= num_local_tokens):
                self._children[child].unused(found.transfer_id)

    def _asked(self, request_id: str, last_hash: bytes, without: Collection[int]) -> _Asked:
        """Return the look-up in flight, or a new one if that is of an earlier request with the same id."""
        now_s = self._clock.now_s()
        asked = self._open.get(request_id)
        is_recent = asked is not None and now_s - asked.since_s < 2 * self._timeout_s + 1
        if asked is not None and is_recent and asked.last_hash == last_hash:
            return asked
        self.forget(request_id)
        children = [i for i, child in enumerate(self._children) if i not in without and child.can_look_up()]
        return _Asked(last_hash=last_hash, since_s=now_s, children=tuple(children))


logger = logging.getLogger("trencadis.kv")

_MAX_ENTRIES = 4096
"""Most unused hits, and failed loads of ended requests, that are kept; the oldest are evicted."""


@attrs.define
class _Load:
    """One child's load, or hit.

    Attributes:
        child: Index of the child.
        rival_tokens: Most tokens that another child offered, beyond the local hit.
        blocks: Ids of the blocks to load into.
        block_hashes: Hash of each block.
        since_s: Start of the load, seconds on the engine's clock.
    """

    child: int
    rival_tokens: int
    blocks: Sequence[int] = ()
    block_hashes: Sequence[bytes] = ()
    since_s: float = 0.0


class TieredScheduler(KVSchedulerSide, SupportsHandover, SupportsRemoteWorkers, SupportsStepTimes, SupportsMetrics):
    """Forwards every call to all children, which are independent of each other.

    Args:
        children: Children, the nearest first.
        policy: Guarded KV policy; chooses among children with hits.
        clock: The engine's clock.
        config: Table ``[kv_connector.tiered]``.
        counters: Metrics of all children.
    """

    def __init__(
        self,
        children: Sequence[Child],
        *,
        policy: KVPolicy,
        clock: Clock,
        config: TieredConfig,
        counters: TierCounters,
    ) -> None:
        self._children = children
        self._policy = policy
        self._clock = clock
        self._config = config
        self._counters = counters
        self._names = TransferIds(len(children))
        self._lookups = TierLookups(children, clock=clock, timeout_s=config.lookup_timeout_s)
        self._cost = CostModel(clock)
        self._block_size = 0
        self._shared = itertools.count()
        self._offers: BoundedDict[int, _Load] = BoundedDict(_MAX_ENTRIES)
        self._loads: dict[int, _Load] = {}
        self._lost: BoundedDict[int, _Load] = BoundedDict(_MAX_ENTRIES)
        self._avoided: BoundedDict[str, frozenset[int]] = BoundedDict(_MAX_ENTRIES)
        self._unreleased: dict[int, float] = {}
        self._later: list[tuple[int, str, Callable[[KVSchedulerSide], None]]] = []
        self._orders = _no_orders()
        self._told_closed: set[int] = set()

    def on_ranks(self, layouts: Sequence[KVLayout]) -> None:
        """Pass the layouts to every child."""
        for child in self._children:
            child.join(layouts)

    def on_worker_message(self, rank: int, message: bytes) -> None:
        """Forward the message to the child whose worker side sent it."""
        i, own = msgspec.msgpack.decode(message, type=tuple[int, bytes])
        child = self._children[i]
        child.call_capability(
            SupportsRemoteWorkers, "on_worker_message", lambda side: side.on_worker_message(rank, own), None
        )

    def on_ready(self, layout: KVLayout) -> None:
        """Notify every child, one after the other, for an ordered log."""
        self._block_size = layout.block_size
        for child in self._children:
            child.ready(layout)

    # --------------------------------------------------------------------------------------------------- loads

    def lookup(self, request: Request, *, block_hashes: Sequence[bytes], num_local_tokens: int) -> Lookup:
        """Return the hit of the child that the policy chooses; by default the longest, the nearest of equals."""
        hits = self._lookups.find(
            request,
            block_hashes=block_hashes,
            num_local_tokens=num_local_tokens,
            num_tokens=len(block_hashes) * self._block_size,
            without=self._avoided.get(request.request_id, frozenset()),
        )
        if hits is None:
            return Lookup(pending=True)
        hits = [(child, found) for child, found in hits if self._is_new(child, found.transfer_id)]
        if not hits:
            return Lookup()
        chosen = self._choose(hits, num_local_tokens)
        child, found = hits[chosen]
        losers = [hit for i, hit in enumerate(hits) if i != chosen]
        for loser, other in losers:
            self._children[loser].unused(other.transfer_id)
        rivals = [other.num_tokens - num_local_tokens for _, other in losers]
        transfer_id = self._names.outside(child, found.transfer_id)
        self._offers[transfer_id] = _Load(child=child, rival_tokens=max(rivals, default=0))
        return attrs.evolve(found, transfer_id=transfer_id)

    def on_allocated(self, transfer_id: int, *, blocks: Sequence[int], block_hashes: Sequence[bytes]) -> None:
        """Keep the load for the message: saves of other children may read these blocks first."""
        load = self._offers.pop(transfer_id, None)
        if load is None:  # not a hit that was offered
            return
        load.blocks, load.block_hashes, load.since_s = blocks, block_hashes, self._clock.now_s()
        self._loads[transfer_id] = load
        self._orders.loads.append(transfer_id)
        child, own = self._names.inside(transfer_id)
        self._later.append((child, "on_allocated", _allocated(own, blocks, block_hashes)))

    def on_unused(self, transfer_id: int) -> None:
        """Notify the child whose hit it is."""
        if self._offers.pop(transfer_id, None) is not None:
            child, own = self._names.inside(transfer_id)
            self._children[child].unused(own)

    def on_cancelled(self, transfer_id: int) -> None:
        """Notify the child of the load, after the load has begun."""
        child, own = self._names.inside(transfer_id)
        if child >= len(self._children):
            return
        self._loads.pop(transfer_id, None)
        self._unreleased[transfer_id] = self._clock.now_s()
        self._orders.releases.append(transfer_id)
        self._later.append((child, "on_cancelled", lambda side: side.on_cancelled(own)))

    def on_failed(self, request: Request, failed: FailedLoad) -> str:
        """Retry if the child wants to, or if another one has a longer prefix than arrived."""
        child, own = self._names.inside(failed.transfer_id)
        load = self._lost.pop(failed.transfer_id, None)
        inner = attrs.evolve(failed, transfer_id=own)
        if child < len(self._children):
            answer = self._children[child].call("on_failed", lambda side: side.on_failed(request, inner), "compute")
            if answer == "retry":
                return answer
        if load is None or load.rival_tokens <= failed.num_valid_tokens:
            return "compute"
        self._avoided[request.request_id] = self._avoided.get(request.request_id, frozenset()) | {child}
        return "retry"

    # --------------------------------------------------------------------------------------------------- saves

    def on_computed(self, *, blocks: Sequence[int], block_hashes: Sequence[bytes]) -> None:
        """Forward full blocks to all children in use."""
        for child in self._children:
            if child.is_used:
                child.call("on_computed", lambda side: side.on_computed(blocks=blocks, block_hashes=block_hashes), None)

    def on_finished(self, request: Request, *, blocks: Sequence[int]) -> int | None:
        """Pin the blocks until every child that needs them has released them."""
        self._avoided.pop(request.request_id, None)
        members = []
        for i, child in enumerate(self._children):
            own = child.call("on_finished", lambda side: side.on_finished(request, blocks=blocks), None)
            if own is not None:
                members.append(self._names.outside(i, own))
        if not members:
            return None
        transfer_id = members[0] if len(members) == 1 else self._names.shared(next(self._shared))
        if len(members) > 1:
            self._orders.holds.append(Hold(transfer_id, members))
        self._orders.releases.extend(members)
        self._unreleased[transfer_id] = self._clock.now_s()
        return transfer_id

    def finished_params(self, request: Request) -> Mapping[str, Any] | None:
        """Return the transfer parameters of the nearest child that has any."""
        for child in self._children:
            params: Mapping[str, Any] | None = child.call_capability(
                SupportsHandover, "finished_params", lambda side: side.finished_params(request), None
            )
            if params is not None:
                return params
        return None

    def on_cache_hit(self, request: Request, *, num_tokens: int) -> None:
        """Notify all children."""
        self._tell(SupportsHandover, "on_cache_hit", lambda side: side.on_cache_hit(request, num_tokens=num_tokens))

    def on_rejected(self, transfer_params: Mapping[str, Any]) -> None:
        """Notify all children: the parameters do not name one."""
        self._tell(SupportsHandover, "on_rejected", lambda side: side.on_rejected(transfer_params))

    def on_abandoned(self, request: Request) -> None:
        """Notify all children."""
        self._lookups.forget(request.request_id)
        self._tell(SupportsHandover, "on_abandoned", lambda side: side.on_abandoned(request))

    def on_role(self, role: str) -> None:
        """Forward the role to the children with ``SupportsHandover``."""
        self._tell(SupportsHandover, "on_role", lambda side: side.on_role(role))

    # --------------------------------------------------------------------------------------------------- steps

    def take_message(self) -> bytes:
        """Return the children's messages: first saves, then loads."""
        self._close_overdue()
        before = [child.call("take_message", _message, b"") for child in self._children]
        later, self._later = self._later, []
        for i, name, tell in later:
            self._children[i].call_or_close(name, tell)
        told = {i for i, _, _ in later}
        after = [
            child.call("take_message", _message, b"") if i in told else b"" for i, child in enumerate(self._children)
        ]
        close = [i for i, child in enumerate(self._children) if child.is_closed and i not in self._told_closed]
        self._told_closed.update(close)
        orders, self._orders = self._orders, _no_orders()
        orders = msgspec.structs.replace(orders, before=before, after=after, close=close)
        is_empty = not (any(before) or any(after)) and orders == _no_orders(before, after)
        return b"" if is_empty else msgspec.msgpack.encode(orders)

    def on_report(self, report: ConnectorReport) -> None:
        """Split the report among the children, and update metrics."""
        for i, child in enumerate(self._children):
            child.call("on_report", _reported(self._part_of(i, report)), None)
        for transfer_id in report.loaded:
            self._arrived(transfer_id)
        for failed in report.failed:
            self._did_not_arrive(failed)
        for transfer_id in report.released:
            self._unreleased.pop(transfer_id, None)

    def on_step(self, *, num_tokens: int, device_s: float) -> None:
        """Update the cost model, and notify all children."""
        self._cost.computed(num_tokens=num_tokens, seconds=device_s)
        self._tell(SupportsStepTimes, "on_step", lambda side: side.on_step(num_tokens=num_tokens, device_s=device_s))

    def metrics(self) -> str:
        """Return the counters of this connector and, with the label ``tier``, by each child."""
        texts = {
            child.name: child.call_capability(SupportsMetrics, "metrics", _metrics, "") for child in self._children
        }
        return self._counters.text() + merged(texts)

    def close(self) -> None:
        """Close all children."""
        for child in self._children:
            child.close()

    # ------------------------------------------------------------------------------------------------- innards

    def _tell(self, capability: type[Any], name: str, tell: Callable[[Any], None]) -> None:
        """Call a method of all children that have a capability."""
        for child in self._children:
            child.call_capability(capability, name, tell, None)

    def _is_new(self, child: int, own: int) -> bool:
        """Return whether a transfer id is unused; a child that returns one twice is faulty."""
        transfer_id = self._names.outside(child, own)
        if transfer_id not in self._loads and transfer_id not in self._unreleased:
            return True
        self._children[child].call("lookup", lambda _: _raise_twice(own), None)
        return False

    def _choose(self, hits: Sequence[tuple[int, Lookup]], num_local_tokens: int) -> int:
        sources = []
        for child, found in hits:
            num_tokens = found.num_tokens - num_local_tokens
            load_s, compute_s = self._children[child].load_s.at(num_tokens), self._cost.compute_s(num_tokens)
            name = self._children[child].name
            sources.append(SourceView(name=name, num_tokens=num_tokens, load_s=load_s, compute_s=compute_s))
        return self._policy.choose_source(sources)

    def _part_of(self, child: int, report: ConnectorReport) -> ConnectorReport:
        """Return a child's part of a report, with the child's transfer ids."""

        def own(transfer_ids: Sequence[int]) -> tuple[int, ...]:
            return tuple(number for i, number in map(self._names.inside, transfer_ids) if i == child)

        failed = [(*self._names.inside(failed.transfer_id), failed) for failed in report.failed]
        return ConnectorReport(
            loaded=own(report.loaded),
            failed=tuple(attrs.evolve(one, transfer_id=number) for i, number, one in failed if i == child),
            released=own(report.released),
        )

    def _arrived(self, transfer_id: int) -> None:
        load = self._loads.pop(transfer_id, None)
        if load is None:
            return
        num_tokens = len(load.blocks) * self._block_size
        self._children[load.child].loaded(num_tokens=num_tokens, seconds=self._clock.now_s() - load.since_s)
        for child in self._children[: load.child] if self._config.promote else ():
            if child.is_used:
                blocks, hashes = list(load.blocks), list(load.block_hashes)
                child.call("on_computed", _computed(blocks, hashes), None)
                self._counters.promoted(child.name, len(blocks))

    def _did_not_arrive(self, failed: FailedLoad) -> None:
        load = self._loads.pop(failed.transfer_id, None)
        if load is None:
            return
        child = self._children[load.child]
        child.failed(failed.cause, num_valid_tokens=failed.num_valid_tokens)
        self._lost[failed.transfer_id] = load
        if failed.cause == CLOSED and not child.is_closed:
            child.close()

    def _close_overdue(self) -> None:
        """Close children that do not release blocks, before the engine closes all of them."""
        oldest_s = self._clock.now_s() - self._config.release_timeout_s
        for transfer_id in [transfer_id for transfer_id, since_s in self._unreleased.items() if since_s <= oldest_s]:
            i, _ = self._names.inside(transfer_id)
            if i >= len(self._children):
                del self._unreleased[transfer_id]
                self._orders.overdue.append(transfer_id)  # the worker side knows which child still holds it
            elif not self._children[i].is_closed:
                logger.error(
                    "The KV connector %s has held blocks for over %g s and is closed; the others go on.",
                    self._children[i].name,
                    self._config.release_timeout_s,
                )
                self._children[i].close()


class RemotePrefillScheduler(TieredScheduler, SupportsRemotePrefill):
    """Scheduler side of the tiered connector if a child supports remote prefills."""

    def on_sampling(self, fingerprint: SamplingFingerprint) -> None:
        """Forward the sampling fingerprint."""
        self._tell(SupportsRemotePrefill, "on_sampling", lambda side: side.on_sampling(fingerprint))

    def on_waker(self, wake: Callable[[], None]) -> None:
        """Forward the function that wakes the engine."""
        self._tell(SupportsRemotePrefill, "on_waker", lambda side: side.on_waker(wake))

    def take_requests(self) -> Sequence[Request]:
        """Return the requests of all children."""
        found: list[Request] = []
        for child in self._children:
            found += child.call_capability(
                SupportsRemotePrefill, "take_requests", lambda side: tuple(side.take_requests()), ()
            )
        return found

    def take_withdrawn(self) -> Sequence[str]:
        """Return the withdrawn ids of all children."""
        found: list[str] = []
        for child in self._children:
            found += child.call_capability(
                SupportsRemotePrefill, "take_withdrawn", lambda side: tuple(side.take_withdrawn()), ()
            )
        return found

    def on_request_token(self, request_id: str, first: FirstToken) -> None:
        """Forward to all: ids are unique."""
        self._tell(SupportsRemotePrefill, "on_request_token", lambda side: side.on_request_token(request_id, first))

    def on_request_ended(self, request_id: str, *, transfer_params: Mapping[str, Any] | None, error: str) -> None:
        """Forward to all: ids are unique."""
        self._tell(
            SupportsRemotePrefill,
            "on_request_ended",
            lambda side: side.on_request_ended(request_id, transfer_params=transfer_params, error=error),
        )

    def on_backlog(self, num_tokens: int) -> None:
        """Forward the number of queued tokens."""
        self._tell(SupportsRemotePrefill, "on_backlog", lambda side: side.on_backlog(num_tokens))


def _no_orders(before: Sequence[bytes] = (), after: Sequence[bytes] = ()) -> Orders:
    return Orders(list(before), list(after), [], [], [], [], [])


def _message(side: KVSchedulerSide) -> bytes:
    return side.take_message()


def _metrics(side: SupportsMetrics) -> str:
    return side.metrics()


def _allocated(
    transfer_id: int, blocks: Sequence[int], block_hashes: Sequence[bytes]
) -> Callable[[KVSchedulerSide], None]:
    return lambda side: side.on_allocated(transfer_id, blocks=blocks, block_hashes=block_hashes)


def _computed(blocks: Sequence[int], block_hashes: Sequence[bytes]) -> Callable[[KVSchedulerSide], None]:
    return lambda side: side.on_computed(blocks=blocks, block_hashes=block_hashes)


def _reported(report: ConnectorReport) -> Callable[[KVSchedulerSide], None]:
    return lambda side: side.on_report(report)


def _raise_twice(transfer_id: int) -> None:
    raise ValueError(f"transfer id {transfer_id} was given a second time")
