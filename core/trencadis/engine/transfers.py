"""KV loads and saves in flight: parked sequences, and blocks held until nobody touches them.

The connector decides, this module keeps the books: every ticket ends in ``loaded``, ``failed`` or a deadline, and blocks of
a cancelled load stay held until the connector says no transfer can touch them.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from trencadis.engine.sequence import Sequence
from trencadis.interfaces import KVSchedulerSide, Lookup
from trencadis.records import ConnectorReport, Int32Array

if TYPE_CHECKING:
    from trencadis.engine.block_manager import BlockManager
    from trencadis.engine.state import EngineState

__all__ = ["Transfers"]

logger = logging.getLogger("trencadis.engine")


class Transfers:
    """Parked loads and held blocks of one engine.

    Args:
        connector: The scheduler side, or None: then everything here is a no-op.
        load_timeout_s: A load that takes longer is given up and its tokens are computed here.
    """

    def __init__(self, connector: KVSchedulerSide | None = None, *, load_timeout_s: float = 30.0) -> None:
        self._connector = connector
        self._load_timeout_s = load_timeout_s
        self._parked: dict[int, Sequence] = {}
        self._parked_blocks: dict[int, Int32Array] = {}
        self._held: dict[int, Int32Array] = {}
        self._spans: dict[int, tuple[int, int]] = {}
        self.num_failed_loads = 0

    @property
    def has_connector(self) -> bool:
        """True if block hashes are worth computing for the connector's sake."""
        return self._connector is not None

    @property
    def is_active(self) -> bool:
        """True while a report is awaited: the engine must keep stepping even if nothing is scheduled."""
        return bool(self._parked or self._held)

    @property
    def num_parked(self) -> int:
        """Sequences that wait for a load."""
        return len(self._parked)

    @property
    def parked(self) -> tuple[int, ...]:
        """Slots that wait for a load."""
        return tuple([sequence.slot for sequence in self._parked.values()])

    @property
    def num_held_blocks(self) -> int:
        """Blocks that only a transfer holds."""
        return sum(len(blocks) for blocks in self._held.values())

    def lookup(self, sequence: Sequence, *, num_local_tokens: int) -> Lookup:
        """Ask the connector what it has of a prompt; asked again only while it answers ``pending``."""
        if self._connector is None or sequence.looked_up:
            return Lookup()
        found = self._guarded_lookup(sequence, num_local_tokens)
        sequence.looked_up = not found.pending
        return found

    def park(self, sequence: Sequence, ticket: int, *, blocks: Int32Array, span: tuple[int, int], now_s: float) -> None:
        """Note a load into ``blocks[first:last]`` of ``span``; those before are a local hit, those behind will be computed."""
        assert self._connector is not None, "only a connector's hit parks a sequence"
        first, last = span
        sequence.ticket, sequence.park_deadline_s = ticket, now_s + self._load_timeout_s
        self._parked[ticket] = sequence
        self._parked_blocks[ticket] = blocks
        self._spans[ticket] = span
        self._connector.on_allocated(
            ticket, blocks=blocks[first:last].tolist(), block_hashes=sequence.block_hashes[first:last]
        )

    def cancel(self, sequence: Sequence, blocks: BlockManager, *, now_s: float) -> None:
        """Give up a parked load; blocks it may still write to stay held."""
        assert self._connector is not None, "only a connector's hit parks a sequence"
        ticket, sequence.ticket = sequence.ticket, -1
        mine = self._parked_blocks.pop(ticket)
        first, last = self._spans.pop(ticket)
        del self._parked[ticket]
        self._held[ticket] = mine[first:last]
        blocks.release(np.concatenate([mine[:first], mine[last:]]), now_s=now_s)
        self._connector.on_cancelled(ticket)

    def computed(self, blocks: list[int], hashes: list[bytes]) -> None:
        """Offer committed full blocks for saving."""
        if self._connector is not None and blocks:
            self._connector.on_computed(blocks=blocks, block_hashes=hashes)

    def hold(self, sequence: Sequence, blocks: Int32Array) -> bool:
        """True if the connector keeps the blocks of a finished sequence for now."""
        if self._connector is None:
            return False
        ticket = self._connector.on_finished(sequence.request, blocks=blocks.tolist())
        if ticket is None:
            return False
        self._held[ticket] = blocks
        return True

    def take_message(self) -> bytes:
        """Return what the worker side is to do in the next step."""
        return b"" if self._connector is None else self._connector.take_message()

    def apply(self, report: ConnectorReport | None, state: EngineState) -> None:
        """Take a report: unpark what loaded or failed, free what was released; then enforce deadlines."""
        if self._connector is None:
            return
        if report is not None:
            self._connector.on_report(report)
            for ticket in report.loaded:
                if ticket in self._parked:
                    self._unpark(ticket, state, num_valid_tokens=None)
            for failed in report.failed:
                if failed.ticket in self._parked:
                    self.num_failed_loads += 1
                    logger.warning("KV load %d failed: %s; its tokens are computed here.", failed.ticket, failed.cause)
                    self._unpark(failed.ticket, state, num_valid_tokens=failed.num_valid_tokens)
            for ticket in report.released:
                if ticket in self._held:
                    state.blocks.release(self._held.pop(ticket), now_s=state.clock.now_s())
        now_s = state.clock.now_s()
        for sequence in [s for s in self._parked.values() if now_s >= s.park_deadline_s]:
            self.num_failed_loads += 1
            logger.warning(
                "KV load %d took over %g s; its tokens are computed here.", sequence.ticket, self._load_timeout_s
            )
            self.cancel(sequence, state.blocks, now_s=now_s)
            state.unpark(sequence)

    def youngest_parked(self) -> Sequence | None:
        """Return the sequence that was parked last, to be given up first under pressure."""
        return next(reversed(self._parked.values()), None)

    def _unpark(self, ticket: int, state: EngineState, *, num_valid_tokens: int | None) -> None:
        sequence = self._parked.pop(ticket)
        blocks = self._parked_blocks.pop(ticket)
        first, last = self._spans.pop(ticket)
        num_valid = last
        if num_valid_tokens is not None:
            num_valid = min(last, first + num_valid_tokens // state.block_size)
        sequence.ticket = -1
        state.blocks.register_chain(
            blocks[:num_valid].tolist(),
            sequence.block_hashes,
            start=0,
            salt=sequence.request.cache_salt,
            now_s=state.clock.now_s(),
        )
        sequence.loaded_blocks = blocks
        sequence.num_loaded_tokens = num_valid * state.block_size
        state.unpark(sequence)

    def _guarded_lookup(self, sequence: Sequence, num_local_tokens: int) -> Lookup:
        assert self._connector is not None, "lookup() asks only a connector"
        try:
            return self._connector.lookup(
                sequence.request, block_hashes=tuple(sequence.block_hashes), num_local_tokens=num_local_tokens
            )
        except Exception:
            self.num_failed_loads += 1
            logger.exception("The KV connector's look-up raised; counted as a miss.")
            return Lookup()
