"""KV loads and saves in flight: waiting sequences, and blocks pinned until no transfer uses them.

The connector decides, this module keeps the books: every transfer id ends in ``loaded``, ``failed`` or a deadline, and blocks of
a cancelled load stay pinned until the connector says no transfer can touch them. One that never says so is closed: from then on
nothing can touch a block, the pinned ones come back, and the engine goes on without a connector.

    lookup ─▶ load ───┬─ loaded ───────────────▶ runs
                      ├─ failed ───────────────▶ runs; the rest is computed, or looked up again
                      └─ deadline, abort ─▶ pinned ─┬─ released ─────▶ free
                                                    └─ timeout ─▶ connector closed ▶ free

A load that comes layer by layer (:mod:`~trencadis_stages.transfer.layer_loads`) lets no sequence wait.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import attrs

from trencadis.engine.sequences import Sequence
from trencadis.engine.state import EngineState
from trencadis.faults import FaultLog, shown
from trencadis.interfaces import Lookup
from trencadis.interfaces.rank_quorum import RankQuorum
from trencadis.records import ConnectorReport, FailedLoad, Int32Array, Request, TransferCause
from trencadis_stages.transfer.guarded_connector import GuardedConnector
from trencadis_stages.transfer.layer_loads import LayerLoads
from trencadis_stages.transfer.snapshot import LoadSnapshot, TransferSnapshot
from trencadis_stages.transfer.waiting_load import WaitingLoad

__all__ = ["Transfers"]

logger = logging.getLogger("trencadis.engine")
failures = logging.getLogger("trencadis.engine.transfer")

_MAX_RETRIES = 3
"""A store that fails a sequence more often is slower than computing."""


@attrs.define
class _Asked:
    """What became of the look-ups of one sequence.

    Attributes:
        is_done: The connector has answered; it is not asked again.
        deadline_s: When a look-up that is pending is given up; infinity: none is.
        num_failed: KV loads of its prompt that were reported as failed.
    """

    is_done: bool = False
    deadline_s: float = math.inf
    num_failed: int = 0


class Transfers:
    """Loads in flight and pinned blocks of one engine.

    Args:
        state: The engine's state; changed.
        connector: The scheduler side.
        load_timeout_s: A load that takes longer is given up and its tokens are computed here.
        lookup_timeout_s: A look-up that is pending for longer is a miss.
        release_timeout_s: Blocks of a load that was given up, or of a finished sequence, are held no longer than this.
        max_waiting_loads: Sequences that may wait for a load at once; others are computed.
        close_worker: Closes the worker sides; returns when none touches a block any more.
        num_ranks: Worker sides, each of which reports for itself.
        layerwise: Steps can wait for their layers, one by one.
        first_token_results: Counts of first tokens by outcome; see ``FirstTokens.results``.

    Attributes:
        connector: The scheduler side.
        layered: Loads beside which their sequences run.
        first_token_results: Counts of first tokens by outcome.
        num_loads: Loads that were started.
        num_loaded: Loads that arrived whole.
        num_failed_loads: Loads that did not: the report said so, they took too long, or the connector was closed.
        num_cancelled_loads: Loads that were not wanted any more: of an aborted request, or of one whose blocks others needed.
        num_unused: Hits that nothing was loaded for.
        num_late_lookups: Look-ups that were given up because they were pending for too long.
    """

    def __init__(
        self,
        state: EngineState,
        connector: GuardedConnector,
        *,
        load_timeout_s: float = 30.0,
        lookup_timeout_s: float = 60.0,
        release_timeout_s: float = 60.0,
        max_waiting_loads: int = 256,
        close_worker: Callable[[], None] = lambda: None,
        num_ranks: int = 1,
        layerwise: bool = False,
        first_token_results: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._state = state
        self.connector = connector
        self._handover = connector.handover
        self._faults = FaultLog(logger)
        self._load_timeout_s = load_timeout_s
        self._lookup_timeout_s = lookup_timeout_s
        self._release_timeout_s = release_timeout_s
        self._max_waiting_loads = max_waiting_loads
        self._close_worker = close_worker
        self._quorum = RankQuorum(num_ranks)
        self._layerwise = layerwise and connector.is_layerwise
        self.layered = LayerLoads()
        self.first_token_results = first_token_results
        self._asked: defaultdict[int, _Asked] = defaultdict(_Asked)  # by slot
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

    def lookup(self, sequence: Sequence, *, num_local_tokens: int) -> Lookup:
        """Look up a prompt in the connector; again only while the answer is ``pending``, and until a timeout."""
        asked, now_s = self._asked[sequence.slot], self._state.clock.now_s()
        if asked.is_done or len(self._loads) >= self._max_waiting_loads:
            return Lookup()
        found = self.connector.lookup(
            sequence.original_request,
            block_hashes=tuple(sequence.block_hashes),
            num_local_tokens=num_local_tokens,
            is_used=self._is_awaited,
        )
        asked.is_done = not found.pending
        if not found.pending:
            asked.deadline_s = math.inf
            return found
        if asked.deadline_s == math.inf:
            asked.deadline_s = now_s + self._lookup_timeout_s
        return self._end_lookup(sequence, asked) if now_s >= asked.deadline_s else found

    def _end_lookup(self, sequence: Sequence, asked: _Asked) -> Lookup:
        """Treat a pending look-up as a miss."""
        asked.is_done, asked.deadline_s = True, math.inf
        self.num_late_lookups += 1
        self._faults.say(
            f"{self.connector.label}.lookup is pending",
            f"{self.connector.label} was still looking for the prefix of request {sequence.request.request_id} after "
            f"{self._lookup_timeout_s:g} s ([cache] lookup_timeout_s): its prompt is computed here.",
        )
        self.abandoned(sequence.original_request)
        return Lookup()

    def look_up_again(self, sequence: Sequence) -> None:
        """Ask the connector again when the sequence could be admitted."""
        self._asked[sequence.slot].is_done = False

    def forget(self, sequence: Sequence) -> bool:
        """Forget a sequence that ends; returns whether the connector had answered for it."""
        asked = self._asked.pop(sequence.slot, None)
        return asked is not None and asked.is_done

    def put_back(self, sequence: Sequence, found: Lookup) -> None:
        """Tell the connector that its hit is not loaded now; it is asked again."""
        self.unused(found)
        self.look_up_again(sequence)

    def unused(self, found: Lookup) -> None:
        """Notify the connector that its hit is not loaded."""
        if found.num_tokens:
            self.num_unused += 1
            self.connector.on_unused(found.transfer_id)

    def runs_beside(self, sequence: Sequence, found: Lookup) -> bool:
        """Whether a sequence runs during a layer-wise load.

        One whose load failed waits for the next, so that others wait for it but once; and so does one that has its first token, and any
        whose order would come a step late, after a refused plan's.
        """
        if found.first_token is not None or self._asked[sequence.slot].num_failed or self._unsent:
            return False
        return self._layerwise and found.layerwise and not found.approximate

    def load_beside(self, sequence: Sequence, found: Lookup, *, blocks: Int32Array, first: int) -> bool:
        """Begin a layer-wise load into ``blocks``, from place ``first`` of the sequence on.

        Returns:
            False if it could not be begun: it may write to the blocks all the same, so they are given to no sequence.
        """
        self.num_loads += 1
        self.layered.begin(found.transfer_id, sequence, blocks, first=first, state=self._state)
        hashes = sequence.block_hashes[first : first + len(blocks)]
        if self.connector.on_allocated(
            found.transfer_id, blocks=blocks.tolist(), block_hashes=hashes
        ) and self.connector.on_layerwise(found.transfer_id):
            return True
        self._missed(sequence)
        return False

    def load(self, load: WaitingLoad, found: Lookup) -> None:
        """Begin a load that its sequence waits for.

        Its time counts from now, not from the step's moment: look-ups of this step may have waited for a slow store.
        """
        clock = self._state.clock
        self._loads[load.transfer_id] = load
        self.num_loads += 1
        takes = self.connector.on_allocated(
            load.transfer_id,
            blocks=load.all_blocks[load.filled].tolist(),
            block_hashes=load.sequence.block_hashes[load.filled],
        )
        longest_s = min(self._load_timeout_s, found.timeout_s)
        load.deadline_s = clock.source.now_s() + longest_s if takes else clock.now_s()

    def cancel(self, transfer_id: int) -> None:
        """Cancel a load; blocks it may still write to stay pinned."""
        self.num_cancelled_loads += 1
        self._give_up(transfer_id)

    def computed(self, blocks: list[int], hashes: list[bytes]) -> None:
        """Pass committed full blocks to the connector for saving."""
        if blocks:
            self._has_news = True
            self.connector.on_computed(blocks=blocks, block_hashes=hashes)

    def pin(self, sequence: Sequence, blocks: Int32Array) -> bool:
        """Return True if the connector pins the blocks of a finished sequence."""
        transfer_id = self.connector.on_finished(sequence.request, blocks=blocks.tolist())
        if transfer_id is None or self._is_awaited(transfer_id):
            return False
        self._pin(transfer_id, blocks)
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

    def fetch_message(self) -> bool:
        """Return whether there is a message for the worker side; it is asked for if none is at hand."""
        if not self._unsent:
            self._has_news, self._unsent = False, self.connector.take_message()
        return bool(self._unsent)

    def take_message(self) -> bytes:
        """Return the message for the worker side; first that of a step which was never run."""
        self.fetch_message()
        message, self._unsent = self._unsent, b""
        return message

    def apply(self, reports: Mapping[int, ConnectorReport], *, missed_layers: bool = False) -> None:
        """Apply the ranks' reports: resume sequences whose load ended, free released blocks, enforce deadlines.

        Args:
            reports: Those of a step, by rank.
            missed_layers: The step read layers that were not there: none of its layer-wise loads came in time, whatever the report says.
        """
        state = self._state
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
                    self._failed(failed)
            for transfer_id in report.released:
                if transfer_id in self._pinned:
                    self._free(transfer_id)
        self._enforce_deadlines()

    def ranks_lost(self) -> None:
        """End all that was under way on ranks that are gone: loads have failed, blocks are released, messages for them are void.

        Sequences that waited are looked up again; where no block of a sequence is left, nothing of a load that had ended is either.
        """
        state = self._state
        self._unsent = b""
        self.connector.take_message()
        sequences = [load.sequence for load in self._loads.values()]
        lost = [*self._loads, *(load.transfer_id for load in self.layered)]
        failed = [FailedLoad(transfer_id=one, num_valid_tokens=0, cause=TransferCause.LOST) for one in lost]
        self.connector.on_report(ConnectorReport(failed=tuple(failed), released=tuple(self._pinned)))
        for one in failed:
            self._failed(one)
        for transfer_id in list(self._pinned):
            self._free(transfer_id)
        for sequence in sequences:
            self.look_up_again(sequence)
        for slot in state.waiting.slots.tolist():
            sequence = state.table.sequence(slot)
            if isinstance(sequence.claim, WaitingLoad):
                state.drop_claim(sequence)

    def confirm(self, slots: Int32Array) -> bool:
        """Discard the sequences of a committed plan whose layer-wise loads did not succeed; True if there were any.

        Args:
            slots: Those of the plan that still hold their row.
        """
        missing = self.layered.of(slots.tolist())
        for load in missing:
            logger.warning("KV load %d did not come with its layers; its tokens are computed here.", load.transfer_id)
            self._missed(load.sequence)
            self.layered.discard(load.sequence, self._state)
        return bool(missing)

    def step_done(self, *, num_tokens: int, device_s: float) -> None:
        """Pass the tokens and the time of a step to the connector."""
        if self.connector.is_timed and num_tokens:
            self.connector.on_step(num_tokens=num_tokens, device_s=device_s)

    def close(self) -> None:
        """Close the scheduler side; may be called twice."""
        self.connector.close()

    def inspect(self) -> TransferSnapshot:
        """Return a copy of the state, for tests and debuggers."""
        loads = [
            LoadSnapshot(
                transfer_id=load.transfer_id,
                slot=load.sequence.slot,
                blocks=tuple(load.all_blocks.tolist()),
                written=tuple(load.all_blocks[load.first : load.last].tolist()),
                layerwise=False,
            )
            for load in self._loads.values()
        ]
        loads += [
            LoadSnapshot(
                transfer_id=load.transfer_id,
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

    def _failed(self, failed: FailedLoad) -> None:
        """Keep the blocks that arrived; the rest is computed, or looked up again if the connector wants to retry."""
        state = self._state
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
        asked = self._asked[sequence.slot]
        asked.num_failed += 1
        again = self.connector.on_failed(sequence.request, failed) and asked.num_failed <= _MAX_RETRIES
        if again:
            state.drop_claim(sequence)  # what arrived is in the prefix cache, where the next look-up finds it
            asked.is_done = False
        failures.warning(
            "KV load %d failed: %s; %s.",
            failed.transfer_id,
            failed.cause,
            "it is looked up again" if again else "its tokens are computed here",
        )

    def _missed(self, sequence: Sequence) -> None:
        self._asked[sequence.slot].num_failed += 1
        self.num_failed_loads += 1
        self._give_up(self.layered.id_of(sequence))

    def _give_up(self, transfer_id: int) -> None:
        """Pin the blocks of a load until nothing writes to them."""
        if transfer_id in self.layered:
            blocks = self.layered.drop(transfer_id).blocks
        else:
            blocks = self._loads.pop(transfer_id).give_up(self._state)
        self._pin(transfer_id, blocks)
        self.connector.on_cancelled(transfer_id)

    def _end_load(self, load: WaitingLoad) -> None:
        """Give up a load that failed without a report; its sequence waits to be computed."""
        self.num_failed_loads += 1
        self._give_up(load.transfer_id)
        load.sequence.claim = None
        self._state.resume(load.sequence, front=True)

    def _enforce_deadlines(self) -> None:
        now_s = self._state.clock.now_s()
        for load in [load for load in self._loads.values() if now_s >= load.deadline_s]:
            logger.warning("KV load %d took too long; its tokens are computed here.", load.transfer_id)
            self._end_load(load)
        overdue = [transfer_id for transfer_id, until_s in self._pinned_until_s.items() if now_s >= until_s]
        if overdue:
            self._switch_off(overdue)

    def _switch_off(self, overdue: list[int]) -> None:
        """Close a connector that does not release blocks; all its blocks are free afterwards."""
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
        for load in list(self._loads.values()):
            self._end_load(load)
        self.confirm(self._state.running)
        for transfer_id in list(self._pinned):
            self._free(transfer_id)

    def _pin(self, transfer_id: int, blocks: Int32Array) -> None:
        self._pinned[transfer_id] = blocks
        self._pinned_until_s[transfer_id] = self._state.clock.now_s() + self._release_timeout_s
        self._state.num_kept_blocks = self.num_pinned_blocks

    def _free(self, transfer_id: int) -> None:
        state = self._state
        del self._pinned_until_s[transfer_id]
        state.blocks.release(self._pinned.pop(transfer_id), now_s=state.clock.now_s())
        state.num_kept_blocks = self.num_pinned_blocks
