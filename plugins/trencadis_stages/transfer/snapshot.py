"""Copies of what is kept of KV transfers, for tests, conformance suites and debuggers."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

__all__ = ["LoadSnapshot", "TransferSnapshot"]


@attrs.frozen(kw_only=True)
class LoadSnapshot:
    """A KV load in flight.

    Attributes:
        transfer_id: Id of the transfer.
        slot: Slot of the sequence that waits for it or runs beside it.
        blocks: Device blocks that the load holds, in order of the sequence's tokens.
        written: Those of them that the transfer may write to.
        layerwise: Whether the sequence runs beside the load, which comes layer by layer.
    """

    transfer_id: int
    slot: int
    blocks: tuple[int, ...]
    written: tuple[int, ...]
    layerwise: bool


@attrs.frozen(kw_only=True)
class TransferSnapshot:
    """KV transfers in flight.

    Attributes:
        loads: Loads, in order of their start; those with a waiting sequence first.
        pinned: Device blocks that a transfer may use after its sequence left, by transfer id.
    """

    loads: tuple[LoadSnapshot, ...]
    pinned: Mapping[int, tuple[int, ...]]

    @property
    def num_pinned_blocks(self) -> int:
        """Blocks of ``pinned``."""
        return sum(map(len, self.pinned.values()))

    @property
    def waiting(self) -> tuple[int, ...]:
        """Slots of sequences that wait for a load, in order of its start."""
        return tuple(load.slot for load in self.loads if not load.layerwise)
