"""The stage of engines whose ranks have sequences of their own (``[parallel] attention = "data"``): rows and KV blocks in partitions."""

from __future__ import annotations

import functools
from collections.abc import Callable

import attrs

from trencadis.engine.cache.guarded import GuardedEviction
from trencadis.engine.stage import EngineKinds, Makings, Stage
from trencadis_stages.partitions.partitioned_blocks import PartitionedBlocks
from trencadis_stages.partitions.partitioned_passes import PartitionedPassPlanner
from trencadis_stages.partitions.partitioned_scheduler import PartitionedScheduler

__all__ = ["Partitions"]


class Partitions(Stage):
    """Puts blocks, scheduler and passes over partitions in the place of the engine's own.

    Args:
        makings: The layout is used.
    """

    def __init__(self, makings: Makings) -> None:
        self._number = makings.layout.num_partitions

    def compose(self, kinds: EngineKinds) -> EngineKinds:
        """Divide rows and blocks, a partition for each rank."""
        return attrs.evolve(
            kinds,
            num_parts=self._number,
            blocks=self._blocks,
            scheduler=PartitionedScheduler,
            passes=functools.partial(PartitionedPassPlanner, num_partitions=self._number),
        )

    def _blocks(self, *, num_blocks: int, make_eviction: Callable[[], GuardedEviction]) -> PartitionedBlocks:
        return PartitionedBlocks(num_blocks=num_blocks, evictions=[make_eviction() for _ in range(self._number)])
