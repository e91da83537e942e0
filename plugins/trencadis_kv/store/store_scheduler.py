"""The scheduler side of a connector over a store."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence

import attrs

from trencadis.errors import ConfigValueError, TransferError
from trencadis.interfaces import KVSchedulerSide, Lookup, SupportsMetrics, SupportsRemoteWorkers, SupportsStepTimes
from trencadis.records import ConnectorReport, FailedLoad, KVLayout, Request, TransferCause
from trencadis_kv.interfaces import FailureView, LoadView, SaveView
from trencadis_kv.store.bounded import BoundedDict
from trencadis_kv.store.canary import Canary
from trencadis_kv.store.journal import IndexStore, KeyIndex, repeat
from trencadis_kv.store.lookups import Lookups
from trencadis_kv.store.messages import LoadOrder, SaveOrder, StepOrders, encode_orders
from trencadis_kv.store.objects import StoredBlocks
from trencadis_kv.store.parts import CHUNK_BYTES, StoreParts
from trencadis_kv.store.staging import Staging

__all__ = ["StoreScheduler"]

logger = logging.getLogger("trencadis.kv")

_MAX_ENTRIES = 8192


@attrs.define
class _Started:
    """A load from its allocation to its end."""

    num_blocks: int
    deadline_s: float


class StoreScheduler(KVSchedulerSide, SupportsRemoteWorkers, SupportsStepTimes, SupportsMetrics):
    """Looks up, decides and records; moves no blocks.

    Args:
        parts: Shared state of the connector.
        staging: Staging memory of the saves; only its fill level is read.
    """

    def __init__(self, parts: StoreParts, staging: Staging) -> None:
        self._parts = parts
        self._staging = staging
        self._layouts: Sequence[KVLayout] = ()
        self._index = KeyIndex()
        self._objects: StoredBlocks | None = None
        self._lookups: Lookups | None = None
        self._canary: Canary | None = None
        self._orders = StepOrders(loads=[], saves=[], cancels=[])
        self._transfer_ids = itertools.count()
        self._waits_s: BoundedDict[int, float] = BoundedDict(_MAX_ENTRIES)
        self._attempts: BoundedDict[str, int] = BoundedDict(_MAX_ENTRIES)
        self._started: dict[int, _Started] = {}
        self._failed: dict[int, _Started] = {}

    def on_ranks(self, layouts: Sequence[KVLayout]) -> None:
        """Look up the objects of all ranks; if each rank has its own store, in the keys that the ranks report."""
        self._layouts = layouts
        if self._parts.watch is not None:
            self._parts = attrs.evolve(self._parts, make_store=lambda: IndexStore(self._index))

    def on_worker_message(self, rank: int, message: bytes) -> None:
        """Repeat what a rank did to the shared state."""
        parts = self._parts
        state = {
            "counters": parts.counters,
            "breaker": parts.breaker,
            "cost": parts.cost,
            "recent": parts.recent,
            "index": self._index,
        }
        repeat(message, state, is_first=rank == 0)

    def on_ready(self, layout: KVLayout) -> None:
        """Probe the store; one that fails is not used, and probed again later.

        Raises:
            ConfigValueError: The store does not work, and ``required`` is set.
        """
        self._objects = self._parts.stored(self._layouts or [layout], is_remote=bool(self._layouts))
        self._lookups = Lookups(self._parts, self._objects)
        settings, name = self._parts.settings, self._parts.name
        error = self._lookups.probe().wait(settings.start_timeout_s)
        if error is None:
            return
        self._lookups.interrupt_unwanted()
        if settings.required:
            raise ConfigValueError(
                f"The KV store of {name} cannot be used: {error}",
                hint=f"Mend it, or set [kv_connector.{name}] required to false: serving then goes on without it.",
            )
        self._parts.breaker.open()
        logger.error(
            "The KV store of %s cannot be used (%s): %s Serving goes on without it; it is tried again in %g s.",
            name,
            error.cause,
            error,
            settings.cooldown_s,
        )

    def lookup(self, request: Request, *, block_hashes: Sequence[bytes], num_local_tokens: int) -> Lookup:
        """Look up the blocks after the local hit in the store."""
        if self._objects is None or self._lookups is None:
            return Lookup()
        first = num_local_tokens // self._objects.block_size
        if first >= len(block_hashes) or not self._parts.settings.loads:
            return Lookup()
        if not self._is_usable():
            self._parts.counters.looked_up("skipped")
            return Lookup()
        try:
            num_blocks = self._lookups.find(request.request_id, block_hashes, first=first)
        except TransferError as error:
            self._parts.failed(error, "look-up")
            self._parts.counters.looked_up("timeout")
            return Lookup()
        if num_blocks is None:
            return Lookup(pending=True)
        return self._answer(request, num_blocks, num_local_tokens)

    def on_allocated(self, transfer_id: int, *, blocks: Sequence[int], block_hashes: Sequence[bytes]) -> None:
        """Add the load to the message."""
        wait_s = self._waits_s.pop(transfer_id, self._parts.settings.load_timeout_s)
        self._started[transfer_id] = _Started(len(blocks), self._parts.clock.now_s() + wait_s)
        self._orders.loads.append(LoadOrder(transfer_id, list(blocks), list(block_hashes), wait_s))

    def on_unused(self, transfer_id: int) -> None:
        """Drop the prediction for its load."""
        self._waits_s.pop(transfer_id, None)

    def on_computed(self, *, blocks: Sequence[int], block_hashes: Sequence[bytes]) -> None:
        """Add blocks that the store may not have to the message, as far as the policy admits them."""
        if self._objects is None or not self._parts.settings.saves:
            return
        wanted = self._parts.recent.unknown(block_hashes)
        if not wanted or not self._is_usable():
            return
        view = SaveView(
            num_blocks=len(wanted),
            num_bytes=len(wanted) * self._objects.block_bytes,
            staged_fraction=0.0 if self._layouts else self._staging.fraction,
        )
        num_admitted = max(0, min(self._parts.policy.admits_save(view), len(wanted)))
        if num_admitted < len(wanted):
            self._parts.counters.dropped("policy", len(wanted) - num_admitted)
        wanted = wanted[:num_admitted]
        if wanted:
            hashes = [block_hashes[i] for i in wanted]
            self._parts.recent.add(hashes)
            self._orders.saves.append(SaveOrder([blocks[i] for i in wanted], hashes))

    def on_finished(self, request: Request, *, blocks: Sequence[int]) -> int | None:
        """Pin no blocks: those to be saved were copied."""
        self._attempts.pop(request.request_id, None)
        if self._lookups is not None:
            self._lookups.forget(request.request_id)
        return None

    def on_cancelled(self, transfer_id: int) -> None:
        """Cancel the load; one that took too long counts as a failure of the store."""
        started = self._started.pop(transfer_id, None)
        self._orders.cancels.append(transfer_id)
        if started is None:
            return
        if self._parts.clock.now_s() < started.deadline_s:
            self._parts.counters.failed(TransferCause.CANCELLED)
            return
        self._parts.failed(
            TransferError("The load took too long and was given up.", cause=TransferCause.DEADLINE), "load"
        )

    def take_message(self) -> bytes:
        """Return the message of loads and saves."""
        orders, self._orders = self._orders, StepOrders(loads=[], saves=[], cancels=[])
        return encode_orders(orders) if orders.loads or orders.saves or orders.cancels else b""

    def on_report(self, report: ConnectorReport) -> None:
        """Remove ended loads, and keep the failed ones for :meth:`on_failed`."""
        for transfer_id in report.loaded:
            self._started.pop(transfer_id, None)
        failed = [(one.transfer_id, self._started.pop(one.transfer_id, None)) for one in report.failed]
        self._failed = {transfer_id: started for transfer_id, started in failed if started is not None}

    def on_failed(self, request: Request, failed: FailedLoad) -> str:
        """Return the policy's decision on looking up again."""
        started = self._failed.pop(failed.transfer_id, None)
        if started is None or self._objects is None:
            return "compute"
        num_tokens = started.num_blocks * self._objects.block_size
        num_attempts = self._attempts[request.request_id] = self._attempts.get(request.request_id, 0) + 1
        if self._lookups is not None:
            self._lookups.forget(request.request_id)
        return self._parts.policy.on_failure(
            FailureView(
                cause=failed.cause,
                num_valid_tokens=failed.num_valid_tokens,
                num_lost_tokens=max(0, num_tokens - failed.num_valid_tokens),
                num_attempts=num_attempts,
            )
        )

    def on_step(self, *, num_tokens: int, device_s: float) -> None:
        """Update the cost model and the throttle of loads."""
        self._parts.cost.computed(num_tokens=num_tokens, seconds=device_s)
        self._parts.pace.stepped(device_s=device_s)

    def metrics(self) -> str:
        """Return the metrics."""
        return self._parts.counters.text()

    def close(self) -> None:
        """Stop the look-up thread."""
        if self._lookups is not None:
            self._lookups.close()

    def _answer(self, request: Request, num_blocks: int, num_local_tokens: int) -> Lookup:
        assert self._objects is not None, "on_ready came before"
        size, counters = self._objects.block_size, self._parts.counters
        num_tokens = num_blocks * size
        if num_tokens <= num_local_tokens:
            counters.looked_up("miss")
            return Lookup()
        wait_s = self._parts.policy.admits_load(
            self._load_view(request, num_tokens - num_local_tokens, num_local_tokens)
        )
        if not wait_s > 0.0:  # nan declines as well
            counters.looked_up("declined")
            return Lookup()
        counters.looked_up("hit")
        wait_s = min(wait_s, self._parts.settings.load_timeout_s)
        transfer_id = next(self._transfer_ids)
        self._waits_s[transfer_id] = wait_s
        return Lookup(num_tokens=num_tokens, transfer_id=transfer_id, timeout_s=wait_s)

    def _load_view(self, request: Request, num_tokens: int, num_local_tokens: int) -> LoadView:
        assert self._objects is not None, "on_ready came before"
        cost = self._parts.cost
        num_bytes = num_tokens // self._objects.block_size * self._objects.block_bytes
        return LoadView(
            request=request,
            num_tokens=num_tokens,
            num_local_tokens=num_local_tokens,
            num_bytes=num_bytes,
            load_s=cost.load_s(num_bytes, call_bytes=CHUNK_BYTES),
            compute_s=cost.compute_s(num_tokens),
            timeout_s=self._parts.settings.load_timeout_s,
        )

    def _is_usable(self) -> bool:
        """Return whether the store may be used; requests a probe when one is due."""
        breaker = self._parts.breaker
        if breaker.allows:
            return True
        if self._lookups is not None and breaker.wants_probe():
            self._canary = self._lookups.probe()
        elif self._canary is not None and breaker.half_open_s > self._parts.settings.start_timeout_s:
            self._canary.is_wanted = False
            self._lookups.interrupt_unwanted()  # type: ignore[union-attr] # it made the canary
        return False
