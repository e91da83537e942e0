"""The groups of a replica's ranks: what the executor makes, and what each rank opens."""

from __future__ import annotations

import attrs

from trencadis.interfaces import RankGroups
from trencadis.records import ParallelLayout
from trencadis_plugins.executor.collectives.groups import create_group, open_group
from trencadis_plugins.executor.collectives.owner import GroupAddress, GroupOwner

__all__ = ["Groups", "RankAddresses"]


@attrs.frozen(kw_only=True)
class RankAddresses:
    """What one rank opens its groups with; can be pickled.

    Attributes:
        layout: Layout of the replica.
        rank: Which.
        world: Address of the group of all ranks.
        tensor: Address of the group of the ranks of its stage; None where that is all.
    """

    layout: ParallelLayout
    rank: int
    world: GroupAddress
    tensor: GroupAddress | None

    def open(self) -> RankGroups:
        """Take the rank's place in both; waits for the others where the kind needs it."""
        world = open_group(self.world)
        tensor = world if self.tensor is None else open_group(self.tensor)
        return RankGroups(layout=self.layout, rank=self.rank, tensor=tensor, world=world)


class Groups:
    """All groups of one start of a replica's ranks, as their owner has them.

    Args:
        kind: ``shared_memory``, ``gloo``, ``nccl`` or ``hccl``.
        layout: Layout of the replica.
        generation: Counts starts.
        timeout_s: For which a rank waits for another, seconds.
        host: By which ranks on other machines reach this one; empty: all are here.

    Raises:
        BackendError: There is no room in shared memory.
        CollectiveError: There is no such kind.
    """

    def __init__(self, kind: str, layout: ParallelLayout, *, generation: int, timeout_s: float, host: str = "") -> None:
        self._layout = layout
        self._world = create_group(kind, size=layout.num_ranks, generation=generation, timeout_s=timeout_s, host=host)
        self._stages: list[GroupOwner] = []
        if layout.pipeline > 1:
            for stage in range(layout.pipeline):
                members = range(stage * layout.tensor, (stage + 1) * layout.tensor)
                self._stages.append(self._world.subgroup(tuple(members)))

    def addresses(self, rank: int) -> RankAddresses:
        """Return what a rank is sent."""
        stage, within = self._layout.stage(rank), self._layout.tensor_rank(rank)
        return RankAddresses(
            layout=self._layout,
            rank=rank,
            world=self._world.address(rank),
            tensor=self._stages[stage].address(within) if self._stages else None,
        )

    def opened(self) -> None:
        """Remove what is not needed any more when every rank has opened its groups."""
        self._world.opened()

    def where(self) -> str:
        """Return in which call each rank is, in words; empty where that cannot be seen."""
        return "; ".join(map(str, self._world.progress()))

    def abort(self, reason: str) -> None:
        """Let ranks that wait for others raise, now and from now on."""
        self._world.abort(reason)

    def close(self) -> None:
        """Remove what is left, once no rank lives any more."""
        self._world.unlink()
