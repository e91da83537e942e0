"""Scheduling over partitions of rows and blocks: a sequence is given one when it is admitted, and has all that it has there.

Among the partitions with a free row and enough blocks a sequence takes the one with the fewest blocks, of those in use there and those that
would have to be computed there for it; of equals the first. So a prefix that is cached in a partition counts as much as so many blocks of load,
and a prefix that all requests share comes to be in every partition instead of drawing all of them into one. A sequence for which a stage
keeps something goes back to where it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from trencadis.engine.scheduling.admission import Admission, Outcome
from trencadis.engine.scheduling.scheduler import Preemptor, Scheduler
from trencadis.engine.sequences import Sequence
from trencadis.engine.step import Proposal
from trencadis.interfaces import SchedulerView, TokenSplit
from trencadis.records import BoolArray, Int32Array, Int64Array, Plan
from trencadis_stages.partitions.partitioned_blocks import PartitionedBlocks

__all__ = ["PartitionedAdmission", "PartitionedPreemptor", "PartitionedScheduler"]


class PartitionedAdmission(Admission):
    """Admits waiting sequences in the policy's order, each to a partition, up to the first that no partition has room for."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        assert isinstance(self._state.blocks, PartitionedBlocks), "composed with partitions"
        self._parts = self._state.blocks.parts
        self._reserve = self._watermark // len(self._parts)
        self._partition = 0

    def use(self, partition: int) -> None:
        """Take rows and blocks from a partition from now on."""
        rows = self._state.rows
        self._partition, self._blocks = partition, self._parts[partition]
        self._watermark = 0 if rows.num_free_in(partition) == rows.num_per_part else self._reserve

    def ranked(self, sequence: Sequence) -> list[int]:
        """Return the partitions that a waiting sequence may take, the best one first. Pure."""
        if sequence.claim is not None:
            return [sequence.part]
        hits = [len(self._state.local_hit(sequence, part)) for part in self._parts]
        return sorted(range(len(hits)), key=lambda one: (self._parts[one].num_used - hits[one], one))

    def lacks(self, slot: int) -> tuple[int, int]:
        """Return how many rows and blocks a waiting sequence lacks in the partition that is used: 0, 0 if it could be admitted to any."""
        used = self._partition
        try:
            for partition in self.ranked(self._state.table.sequence(slot)):
                self.use(partition)
                if super().lacks(slot) == (0, 0):
                    return 0, 0
        finally:
            self.use(used)
        return super().lacks(slot)

    @property
    def _num_free_rows(self) -> int:
        return self._state.rows.num_free_in(self._partition)

    def _try(self, sequence: Sequence, view: SchedulerView | None, token_budget: int) -> Outcome:
        if self._is_known(sequence):
            self._choose(sequence)
            if self._lacking == "rows":
                return Outcome.FULL
        return super()._try(sequence, view, token_budget)

    def _is_known(self, sequence: Sequence) -> bool:
        table = self._state.table
        return bool(table.num_tokens[sequence.slot] <= table.num_known_tokens[sequence.slot])

    def _choose(self, sequence: Sequence) -> None:
        """Use the best partition that has room; if none has, the best one that has a row."""
        ranked = self.ranked(sequence)
        with_rows = [one for one in ranked if self._state.rows.num_free_in(one)]
        self._lacking, self._short = ("blocks", self._short) if with_rows else ("rows", (0, 0))
        for partition in [*with_rows, *with_rows[:1]]:
            self.use(partition)
            sequence.part = partition
            if super().lacks(sequence.slot) == (0, 0):
                return


class PartitionedPreemptor(Preemptor):
    """Preempts sequences of one partition for the first waiting one: of the best partition where that is enough."""

    _admission: PartitionedAdmission
    _partition = 0

    def _chosen(self, view: SchedulerView, slot: int) -> list[int]:
        for partition in self._admission.ranked(self._state.table.sequence(slot)):
            self._partition = partition
            self._admission.use(partition)
            if self._admission.lacks(slot) == (0, 0):
                return []
            victims = super()._chosen(view, slot)
            if victims:
                return victims
        return []

    def _candidates(self) -> Int32Array:
        running: Int32Array = self._state.running
        is_there = self._state.table.row[running] // self._state.rows.num_per_part == self._partition
        found: Int32Array = running[is_there]
        return found


class PartitionedScheduler(Scheduler):
    """Makes plans over partitions: decodes get blocks in theirs, and what runs there makes room for them."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        state, policy = self._state, self._policy
        self.admission = PartitionedAdmission(state, policy, max_wait_s=options["max_wait_s"])
        self.preemptor = PartitionedPreemptor(state, policy, self.admission, max_preemptions=options["max_preemptions"])
        assert isinstance(state.blocks, PartitionedBlocks), "composed with partitions"
        self._parts = state.blocks.parts
        self._partition = -1

    def _plan_decodes(
        self, view: SchedulerView, split: TokenSplit, places: Int64Array, computed: Int64Array, ends: Int64Array
    ) -> Plan | None:
        for partition, is_there in self._by_partition(self._state.running):
            if np.count_nonzero(is_there) > self._parts[partition].num_available:  # so many may be missing
                return None
        return super()._plan_decodes(view, split, places, computed, ends)

    def _extend(
        self, view: SchedulerView, decodes: Int32Array, token_budget: int, proposal: Proposal
    ) -> tuple[Int32Array, Int32Array]:
        slots, counts = [decodes[:0]], [np.empty(0, np.int32)]
        for partition, is_there in self._by_partition(decodes):
            with self._within(partition):
                mine, lengths = super()._extend(view, decodes[is_there], token_budget, proposal)
            token_budget -= int(lengths.sum()) - len(mine)
            slots.append(mine)
            counts.append(lengths)
        return np.concatenate(slots), np.concatenate(counts)

    def _allocate(self, view: SchedulerView, decodes: Int32Array, lengths: Int32Array) -> tuple[Int32Array, Int32Array]:
        slots, counts = [decodes[:0]], [lengths[:0]]
        for partition, is_there in self._by_partition(decodes):
            with self._within(partition):
                mine, own = super()._allocate(view, decodes[is_there], lengths[is_there])
            slots.append(mine)
            counts.append(own)
        return np.concatenate(slots), np.concatenate(counts)

    def _preemptible(self) -> Int32Array:
        running = self._state.running
        return running if self._partition < 0 else running[self._partitions(running) == self._partition]

    def _partitions(self, slots: Int32Array) -> Int64Array:
        found: Int64Array = self._state.table.row[slots] // self._state.rows.num_per_part
        return found

    def _by_partition(self, slots: Int32Array) -> Iterator[tuple[int, BoolArray]]:
        """Yield each partition with some of the running slots, and which."""
        partitions = self._partitions(slots)
        for partition in range(len(self._parts)):
            is_there = partitions == partition
            if is_there.any():
                yield partition, is_there

    @contextlib.contextmanager
    def _within(self, partition: int) -> Iterator[None]:
        """Allocate and preempt in one partition within this context."""
        was = self._partition, self._blocks
        self._partition, self._blocks = partition, self._parts[partition]
        try:
            yield
        finally:
            self._partition, self._blocks = was
