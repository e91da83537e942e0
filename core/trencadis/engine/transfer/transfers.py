"""KV loads and saves in flight: waiting sequences, and blocks pinned until no transfer uses them.

The connector decides, this module keeps the books: every transfer id ends in ``loaded``, ``failed`` or a deadline, and blocks of
a cancelled load stay pinned until the connector says no transfer can touch them. One that never says so is closed: from then on
nothing can touch a block, the pinned ones come back, and the engine goes on without a connector.

    lookup ─▶ load ───┬─ loaded ───────────────▶ runs
                      ├─ failed ───────────────▶ runs; the rest is computed, or looked up again
                      └─ deadline, abort ─▶ pinned ─┬─ released ─────▶ free
                                                    └─ timeout ─▶ connector closed ▶ free

A load that comes layer by layer (:mod:`~trencadis.engine.transfer.layer_loads`) lets no sequence wait.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from trencadis.engine.inspect.snapshot import LoadSnapshot, TransferSnapshot
from trencadis.engine.sequences import Sequence
from trencadis.engine.transfer.first_tokens import FirstTokens
from trencadis.engine.transfer.guarded_connector import GuardedConnector
from trencadis.engine.transfer.layer_loads import LayerLoads
from trencadis.engine.transfer.rank_quorum import RankQuorum
from trencadis.engine.transfer.waiting_load import WaitingLoad
from trencadis.faults import FaultLog, shown
from trencadis.interfaces import Lookup
from trencadis.records import ConnectorReport, FailedLoad, Int32Array, Request, TransferCause

if TYPE_CHECKING:
    from trencadis.clock import HeldClock
    from trencadis.engine.cache.block_manager import BlockManager
    from trencadis.engine.state import EngineState

__all__ = ["Transfers"]

logger = logging.getLogger("trencadis.engine")
failures = logging.getLogger("trencadis.engine.transfer")

_MAX_RETRIES = 3
"""Of one sequence: a store that fails it more often is slower than computing."""


class Transfers:
    """Loads in flight and pinned blocks of one engine.

    Args:
        connector: The scheduler side, or None: then everything here is a no-op.
        load_timeout_s: A load that takes longer is given up and its tokens are computed here.
        lookup_timeout_s: A look-up that is pending for longer is a miss.
        release_timeout_s: Blocks of a load that was given up, or of a finished sequence, are held no longer than this.
        max_waiting_loads: Sequences that may wait for a load at once; others are computed.
        close_worker: Closes the worker sides; returns when none touches a block any more.
        num_ranks: Worker sides, each of which reports for itself.
        layerwise: Steps can wait for their layers, one by one.
        first_tokens: Takes those that come with a prefix; if None, any token of 31 bits.

    Attributes:
        connector: As given.
        has_connector: There is one, so that block hashes are worth computing for its sake.
        layered: Loads beside which their sequences run.
        first_tokens: As given.
        num_loads: Loads that were started.
        num_loaded: Loads that arrived whole.
        num_failed_loads: Loads that did not: the report said so, they took too long, or the connector was closed.
        num_cancelled_loads: Loads that were not wanted any more: of an aborted request, or of one whose blocks others needed.
        num_unused: Hits that nothing was loaded for.
        num_late_lookups: Look-ups that were given up because they were pending for too long.
    """

    def __init__(
        self,
        connector: GuardedConnector | None = None,
        *,
        load_timeout_s: float = 30.0,
        lookup_timeout_s: float = 60.0,
        release_timeout_s: float = 60.0,
        max_waiting_loads: int = 256,
        close_worker: Callable[[], None] = lambda: None,
        num_ranks: int = 1,
        layerwise: bool = False,
        first_tokens: FirstTokens | None = None,
    ) -> None:
        self.connector = connector
        self.has_connector = connector is not None
        self._handover = None if connector is None else connector.handover
        self._is_timed = connector is not None and connector.is_timed
        self._faults = FaultLog(logger)
        self._load_timeout_s = load_timeout_s
        self._lookup_timeout_s = lookup_timeout_s
        self._release_timeout_s = release_timeout_s
        self._max_waiting_loads = max_waiting_loads
        self._close_worker = close_worker
        self._quorum = RankQuorum(num_ranks)
        self._layerwise = layerwise and connector is not None and connector.is_layerwise
        self.layered = LayerLoads()
        self.first_tokens = first_tokens or FirstTokens()
        self._loads: dict[int, WaitingLoad] = {}
        self._pinned: dict[int, Int32Array] = {}
        self._pinned_until_s: dict[int, float] = {}
        self._has_news = False
        self._unsent = b""
        self.num_loads = self.num_loaded = self.num_failed_loads = self.num_cancelled_loads = self.num_unused = 0
        self.num_late_lookups = 0

    @property
    def is_active(self) -> bool:
        """True while a report is awaited: the engine must keep stepping even if nothing is scheduled."""
        return bool(self._loads or self._pinned)

    @property
    def has_message(self) -> bool:
        """True if the connector may have a message for its worker side that no step has carried yet."""
        return self._has_news or bool(self._unsent)

    @property
    def wants_step(self) -> bool:
        """True while an empty step is useful: a report is awaited, or the last computed blocks are not saved yet."""
        return self.is_active or self.has_message

    @property
    def num_waiting_for_kv(self) -> int:
        """Sequences that wait for a load."""
        return len(self._loads)

    @property
    def waiting_for_kv(self) -> tuple[int, ...]:
        """Slots of sequences that wait for a load."""
        return tuple([load.sequence.slot for load in self._loads.values()])

    @property
    def num_pinned_blocks(self) -> int:
        """Blocks that only a transfer references."""
        return sum(len(blocks) for blocks in self._pinned.values())

    @property
    def num_ignored(self) -> int:
        """Entries of reports without effect: repeated, or of unknown transfer ids."""
        return self._quorum.num_ignored

    def lookup(self, sequence: Sequence, *, num_local_tokens: int, now_s: float) -> Lookup:
        """Look up a prompt in the connector; again only while the answer is ``pending``, and until a timeout."""
        if self.connector is None or sequence.looked_up or len(self._loads) >= self._max_waiting_loads:
            return Lookup()
        found = self.connector.lookup(
            sequence.original_request,
            block_hashes=tuple(sequence.block_hashes),
            num_local_tokens=num_local_tokens,
            is_used=self._is_awaited,
        )
        sequence.looked_up = not found.pending
        if not found.pending:
            sequence.lookup_deadline_s = math.inf
            return found
        if sequence.lookup_deadline_s == math.inf:
            sequence.lookup_deadline_s = now_s + self._lookup_timeout_s
        return self._end_lookup(sequence) if now_s >= sequence.lookup_deadline_s else found

    def _end_lookup(self, sequence: Sequence) -> Lookup:
        """Treat a pending look-up as a miss."""
        assert self.connector is not None, "only a connector is still looking"
        sequence.looked_up, sequence.lookup_deadline_s = True, math.inf
        self.num_late_lookups += 1
        self._faults.say(
            f"{self.connector.label}.lookup is pending",
            f"{self.connector.label} was still looking for the prefix of request {sequence.request.request_id} after "
            f"{self._lookup_timeout_s:g} s ([cache] lookup_timeout_s): its prompt is computed here.",
        )
        self.abandoned(sequence.original_request)
        return Lookup()

    def unused(self, found: Lookup) -> None:
        """Notify the connector that its hit is not loaded."""
        if self.connector is not None and found.num_tokens:
            self.num_unused += 1
            self.connector.on_unused(found.transfer_id)

    def goes_by_layer(self, sequence: Sequence, found: Lookup) -> bool:
        """Whether a sequence runs during a layer-wise load.

        One whose load failed waits for the next, so that others wait for it but once; and so does one that has its first token, and any
        whose order would come a step late, after a refused plan's.
        """
        if found.first_token is not None or sequence.num_failed_loads or self._unsent:
            return False
        return self._layerwise and found.layerwise and not found.approximate

    def run_beside(
        self, sequence: Sequence, found: Lookup, *, blocks: Int32Array, first: int, state: EngineState
    ) -> bool:
        """Begin a layer-wise load into ``blocks``, from place ``first`` of the sequence on.

        Returns:
            False if it could not be begun: it may write to the blocks all the same, so they are given to no sequence.
        """
        assert self.connector is not None, "only a connector's hit is loaded"
        self.num_loads += 1
        self.layered.begin(found.transfer_id, sequence, blocks, first=first, state=state)
        hashes = sequence.block_hashes[first : first + len(blocks)]
        if self.connector.on_allocated(
            found.transfer_id, blocks=blocks.tolist(), block_hashes=hashes
        ) and self.connector.on_layerwise(found.transfer_id):
            return True
        self._missed(sequence, state)
        return False

    def load(
        self, sequence: Sequence, found: Lookup, *, blocks: Int32Array, span: tuple[int, int], clock: HeldClock
    ) -> None:
        """Begin a load into ``blocks[first:last]`` of ``span``; earlier blocks are a local hit, later ones will be computed.

        Its time counts from now, not from the step's moment: look-ups of this step may have waited for a slow store.
        """
        assert self.connector is not None, "only a connector's hit is loaded"
        sequence.transfer_id = transfer_id = found.transfer_id
        load = self._loads[transfer_id] = WaitingLoad(
            sequence=sequence, blocks=blocks, first=span[0], last=span[1], is_approximate=found.approximate
        )
        self.num_loads += 1
        takes = self.connector.on_allocated(
            transfer_id, blocks=blocks[load.filled].tolist(), block_hashes=sequence.block_hashes[load.filled]
        )
        longest_s = min(self._load_timeout_s, found.timeout_s)
        sequence.load_deadline_s = clock.source.now_s() + longest_s if takes else clock.now_s()

    def cancel(self, sequence: Sequence, blocks: BlockManager, *, now_s: float) -> None:
        """Cancel a load; blocks it may still write to stay pinned."""
        self.num_cancelled_loads += 1
        self._give_up(sequence, blocks, now_s=now_s)

    def computed(self, blocks: list[int], hashes: list[bytes]) -> None:
        """Pass committed full blocks to the connector for saving."""
        if self.connector is not None and blocks:
            self._has_news = True
            self.connector.on_computed(blocks=blocks, block_hashes=hashes)

    def pin(self, sequence: Sequence, blocks: Int32Array, *, now_s: float) -> bool:
        """Return True if the connector pins the blocks of a finished sequence."""
        if self.connector is None:
            return False
        transfer_id = self.connector.on_finished(sequence.request, blocks=blocks.tolist())
        if transfer_id is None or self._is_awaited(transfer_id):
            return False
        self._pin(transfer_id, blocks, now_s)
        return True

    def cache_hit(self, request: Request, *, num_tokens: int) -> None:
        """Notify the connector how much of a finished request's prompt was cached."""
        if self._handover is not None:
            self._handover.on_cache_hit(request, num_tokens=num_tokens)

    def finished_params(self, request: Request) -> Mapping[str, Any] | None:
        """Return the transfer parameters for the engine that continues a finished request, or None."""
        return None if self._handover is None else self._handover.finished_params(request)

    def not_served(self, transfer_params: Mapping[str, Any] | None) -> None:
        """Notify the connector that a request was rejected, or aborted before its look-up."""
        if self._handover is not None and transfer_params is not None:
            self._handover.on_rejected(transfer_params)

    def role(self, name: str) -> None:
        """Notify the connector of the engine's role."""
        if self._handover is not None:
            self._handover.on_role(name)

    def abandoned(self, request: Request) -> None:
        """Notify the connector that a request was aborted before it was loaded."""
        if self._handover is not None:
            self.not_served(request.transfer_params)
            self._handover.on_abandoned(request)

    def take_message(self) -> bytes:
        """Return the message for the worker side; first that of a step which was never run."""
        message, self._unsent = self._unsent, b""
        if not message and self.connector is not None:
            self._has_news, message = False, self.connector.take_message()
        return message

    def put_back(self, message: bytes) -> None:
        """Keep the message of a plan that was not run."""
        self._unsent = message

    def apply(self, reports: Mapping[int, ConnectorReport], state: EngineState, *, missed_layers: bool = False) -> None:
        """Apply the ranks' reports: resume sequences whose load ended, free released blocks, enforce deadlines.

        Args:
            reports: Of a step, by rank.
            state: Of the engine; changed.
            missed_layers: The step read layers that were not there: none of its layer-wise loads came in time, whatever the report says.
        """
        if self.connector is None:
            return
        if reports:
            for rank, one in sorted(reports.items()):
                for message in one.messages:
                    self.connector.on_worker_message(rank, message)
            report = self._quorum.merge(reports, is_awaited=self._is_awaited, is_pinned=self._pinned.__contains__)
            self.connector.on_report(report)
            self._has_news |= bool(report.loaded or report.failed or report.released)
            for transfer_id in report.loaded:
                if transfer_id in self._loads:
                    self.num_loaded += 1
                    self._loads.pop(transfer_id).end(state)
                elif transfer_id in self.layered:
                    self.num_loaded += 1
                    self.layered.came(transfer_id, state, too_late=missed_layers)
            for failed in report.failed:
                if failed.transfer_id in self._loads or failed.transfer_id in self.layered:
                    self._failed(failed, state)
            for transfer_id in report.released:
                if transfer_id in self._pinned:
                    self._free(transfer_id, state)
        self._enforce_deadlines(state)

    def ranks_lost(self, state: EngineState) -> None:
        """End all that was under way on ranks that are gone: loads have failed, blocks are released, messages for them are void.

        Sequences that waited are looked up again; where no block of a sequence is left, nothing of a load that had ended is either.
        """
        if self.connector is None:
            return
        self._unsent = b""
        self.connector.take_message()
        sequences = [load.sequence for load in self._loads.values()]
        failed = [
            FailedLoad(transfer_id=transfer_id, num_valid_tokens=0, cause=TransferCause.LOST)
            for transfer_id in self._loads
        ]
        failed += [
            FailedLoad(transfer_id=load.sequence.transfer_id, num_valid_tokens=0, cause=TransferCause.LOST)
            for load in self.layered
        ]
        self.connector.on_report(ConnectorReport(failed=tuple(failed), released=tuple(self._pinned)))
        for one in failed:
            self._failed(one, state)
        for transfer_id in list(self._pinned):
            self._free(transfer_id, state)
        for sequence in sequences:
            sequence.looked_up = False
        for slot in state.waiting.slots.tolist():
            state.drop_loaded(state.table.sequence(slot))

    def confirm(self, slots: Int32Array, state: EngineState) -> bool:
        """Discard the sequences of a committed plan whose layer-wise loads did not succeed; True if there were any.

        Args:
            slots: Of the plan, those that still hold their row.
            state: Of the engine; changed.
        """
        missing = self.layered.of(slots.tolist())
        for sequence in missing:
            logger.warning(
                "KV load %d did not come with its layers; its tokens are computed here.", sequence.transfer_id
            )
            self._missed(sequence, state)
            self.layered.discard(sequence, state)
        return bool(missing)

    def step_done(self, *, num_tokens: int, device_s: float) -> None:
        """Pass the tokens and the time of a step to the connector."""
        if self._is_timed and num_tokens:
            assert self.connector is not None, "only a connector is timed"
            self.connector.on_step(num_tokens=num_tokens, device_s=device_s)

    def metrics(self) -> str:
        """Return the metrics in Prometheus' text format; empty without a connector."""
        if self.connector is None:
            return ""
        from trencadis.engine.transfer.transfer_metrics import (
            transfer_metrics,  # its library is of use to those who scrape
        )

        return transfer_metrics(self)

    def close(self) -> None:
        """Close the scheduler side; may be called twice."""
        if self.connector is not None:
            self.connector.close()

    def youngest_load(self) -> Sequence | None:
        """Return the sequence whose load began last, to be given up first under pressure."""
        return next((load.sequence for load in reversed(self._loads.values())), None)

    def inspect(self) -> TransferSnapshot:
        """Return a copy of the state, for tests and debuggers."""
        loads = [
            LoadSnapshot(
                transfer_id=transfer_id,
                slot=load.sequence.slot,
                blocks=tuple(load.blocks.tolist()),
                written=tuple(load.blocks[load.first : load.last].tolist()),
                layerwise=False,
            )
            for transfer_id, load in self._loads.items()
        ]
        loads += [
            LoadSnapshot(
                transfer_id=load.sequence.transfer_id,
                slot=load.sequence.slot,
                blocks=tuple(load.blocks.tolist()),
                written=tuple(load.blocks.tolist()),
                layerwise=True,
            )
            for load in self.layered
        ]
        return TransferSnapshot(
            loads=tuple(loads),
            pinned={transfer_id: tuple(blocks.tolist()) for transfer_id, blocks in self._pinned.items()},
        )

    def _is_awaited(self, transfer_id: int) -> bool:
        """Return whether a transfer id names a load, or blocks that are pinned."""
        return transfer_id in self._loads or transfer_id in self.layered or transfer_id in self._pinned

    def _failed(self, failed: FailedLoad, state: EngineState) -> None:
        """Keep the blocks that arrived; the rest is computed, or looked up again if the connector wants to retry."""
        assert self.connector is not None, "only a connector's hit is loaded"
        self.num_failed_loads += 1
        if failed.transfer_id in self.layered:
            load = self.layered.drop(failed.transfer_id)
            sequence = load.sequence
            state.blocks.release(load.blocks, now_s=state.clock.now_s())
            self.layered.discard(sequence, state)
        else:
            waiting = self._loads.pop(failed.transfer_id)
            sequence = waiting.sequence
            waiting.end(state, num_valid_tokens=failed.num_valid_tokens)
        sequence.num_failed_loads += 1
        again = self.connector.on_failed(sequence.request, failed) and sequence.num_failed_loads <= _MAX_RETRIES
        if again:
            state.drop_loaded(sequence)  # what arrived is in the prefix cache, where the next look-up finds it
            sequence.looked_up = False
        failures.warning(
            "KV load %d failed: %s; %s.",
            failed.transfer_id,
            failed.cause,
            "it is looked up again" if again else "its tokens are computed here",
        )

    def _missed(self, sequence: Sequence, state: EngineState) -> None:
        sequence.num_failed_loads += 1
        self.num_failed_loads += 1
        self._give_up(sequence, state.blocks, now_s=state.clock.now_s())

    def _give_up(self, sequence: Sequence, blocks: BlockManager, *, now_s: float) -> None:
        """Pin the blocks of a load until nothing writes to them."""
        assert self.connector is not None, "only a connector's hit is loaded"
        transfer_id, sequence.transfer_id = sequence.transfer_id, -1
        if transfer_id in self.layered:
            self._pin(transfer_id, self.layered.drop(transfer_id).blocks, now_s)
        else:
            self._pin(transfer_id, self._loads.pop(transfer_id).give_up(blocks, now_s=now_s), now_s)
        self.connector.on_cancelled(transfer_id)

    def _enforce_deadlines(self, state: EngineState) -> None:
        now_s = state.clock.now_s()
        for sequence in [load.sequence for load in self._loads.values() if now_s >= load.sequence.load_deadline_s]:
            self.num_failed_loads += 1
            logger.warning("KV load %d took too long; its tokens are computed here.", sequence.transfer_id)
            self._give_up(sequence, state.blocks, now_s=now_s)
            state.end_remote_kv_wait(sequence)
        overdue = [transfer_id for transfer_id, until_s in self._pinned_until_s.items() if now_s >= until_s]
        if overdue:
            self._switch_off(state, overdue)

    def _switch_off(self, state: EngineState, overdue: list[int]) -> None:
        """Close a connector that does not release blocks; all its blocks are free afterwards."""
        assert self.connector is not None, "only a connector holds blocks"
        logger.error(
            "%s has held %d blocks for over %g s (transfer ids %s) and is closed; serving goes on without it. Mend it, or choose another "
            "in kv_connector.name.",
            self.connector.label,
            sum(len(self._pinned[transfer_id]) for transfer_id in overdue),
            self._release_timeout_s,
            shown(overdue),
        )
        self.connector.close()
        self._close_worker()
        now_s = state.clock.now_s()
        for sequence in [load.sequence for load in self._loads.values()]:
            self.num_failed_loads += 1
            self._give_up(sequence, state.blocks, now_s=now_s)
            state.end_remote_kv_wait(sequence)
        self.confirm(state.running, state)
        for transfer_id in list(self._pinned):
            self._free(transfer_id, state)

    def _pin(self, transfer_id: int, blocks: Int32Array, now_s: float) -> None:
        self._pinned[transfer_id] = blocks
        self._pinned_until_s[transfer_id] = now_s + self._release_timeout_s

    def _free(self, transfer_id: int, state: EngineState) -> None:
        del self._pinned_until_s[transfer_id]
        state.blocks.release(self._pinned.pop(transfer_id), now_s=state.clock.now_s())
