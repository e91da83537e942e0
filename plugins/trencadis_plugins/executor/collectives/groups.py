"""Groups of ranks: the owner creates them, sends each rank process its address, and the rank opens it.

owner    world = create_group("shared_memory", size=4, generation=1)
         stage = world.subgroup((2, 3))
         ... start message of rank 2: world.address(2), stage.address(0)
rank     world = open_group(address)      the world before its subgroups
owner    world.unlink()                   when all have opened, or when all have ended

What is left of owners that were killed, the next one to create a group in shared memory removes.
"""

from __future__ import annotations

import itertools
import os
from typing import Final

import attrs

from trencadis.errors import CollectiveError
from trencadis.interfaces import Collective
from trencadis_plugins.executor.collectives.group_memory import GroupMemory, RankProgress
from trencadis_plugins.executor.collectives.owner import GroupAddress, GroupOwner, require_members
from trencadis_plugins.executor.collectives.segment import Layout, Segment, remove_leftovers
from trencadis_plugins.executor.collectives.waiting import Futex

__all__ = ["KINDS", "create_group", "open_group"]

KINDS: Final = ("shared_memory", "gloo", "nccl", "hccl")
MOST_RANKS: Final = 32
"""Most ranks of a group in shared memory."""
_NUMBERS: Final = itertools.count()


def create_group(
    kind: str, *, size: int, generation: int = 0, timeout_s: float = 30.0, num_processes: int = 0, host: str = ""
) -> GroupOwner:
    """Make a group, to be opened by as many ranks.

    Args:
        kind: One of :data:`KINDS`. Of one rank all kinds are the same.
        size: Ranks, at least 1.
        generation: See :class:`GroupAddress`.
        timeout_s: See :class:`GroupAddress`.
        num_processes: See :class:`GroupAddress`.
        host: By which ranks on other machines reach this one; empty: all ranks are here. Not for shared memory.

    Raises:
        BackendError: There is no room in shared memory, or the system has none.
        CollectiveError: There is no such kind, or a group of that kind cannot have so many ranks.
    """
    _require_kind(kind)
    if size < 1 or (kind == "shared_memory" and size > MOST_RANKS):
        raise CollectiveError(f'A group of kind "{kind}" has 1 to {MOST_RANKS} ranks, not {size}.')
    address = GroupAddress(
        kind=kind,
        name="",
        rank=0,
        size=size,
        generation=generation,
        timeout_s=timeout_s,
        num_processes=num_processes or size,
    )
    if size == 1:
        return _AloneOwner(address)
    if kind == "shared_memory":
        return _SharedMemoryOwner(address)
    from trencadis_plugins.executor.collectives.stores import StoreOwner

    return StoreOwner(address, host=host)


def open_group(address: GroupAddress) -> Collective:
    """Take a rank's place in a group that its owner has made.

    Raises:
        CollectiveError: There is no such group, its ranks did not come, or the rank is taken.
    """
    _require_kind(address.kind)
    if not 0 <= address.rank < address.size:
        raise CollectiveError(f"Rank {address.rank} is not in a group of {address.size} ranks.")
    if address.size == 1 and not address.name:
        from trencadis_plugins.executor.collectives.alone import Alone

        return Alone()
    if address.kind == "shared_memory":
        from trencadis_plugins.executor.collectives.shared_memory import SharedMemoryCollective
        from trencadis_plugins.executor.collectives.waiting import Patience, available_cores

        return SharedMemoryCollective(
            Segment.open(address.name, address.size),
            address.rank,
            timeout_s=address.timeout_s,
            patience=Patience.of(address.num_processes, available_cores()),
        )
    from trencadis_plugins.executor.collectives.torch_distributed import open_torch_group

    return open_torch_group(address)


def _require_kind(kind: str) -> None:
    if kind not in KINDS:
        raise CollectiveError(f'There are no collectives "{kind}"; there are {", ".join(KINDS)}.')


class _AloneOwner(GroupOwner):
    """Owner of a group of one rank: there is nothing to own."""

    def __init__(self, address: GroupAddress) -> None:
        self.size = 1
        self._address = address

    def address(self, rank: int) -> GroupAddress:
        return attrs.evolve(self._address, rank=rank)

    def subgroup(self, members: tuple[int, ...]) -> GroupOwner:
        require_members(members, 1)
        return self

    def progress(self) -> tuple[RankProgress, ...]:
        return ()

    def abort(self, reason: str = "") -> None:
        """Do nothing: no call of one rank waits."""

    def opened(self) -> None:
        """Do nothing."""

    def unlink(self) -> None:
        """Do nothing."""


class _SharedMemoryOwner(GroupOwner):
    """Owner of a segment.

    Raises:
        BackendError: There is no room for it.
    """

    def __init__(self, address: GroupAddress) -> None:
        self.size = address.size
        name = f"trencadis-{os.getpid()}-{address.generation}-g{next(_NUMBERS)}"
        self._address = attrs.evolve(address, name=name)
        Futex(0)  # which says where this cannot work
        remove_leftovers()
        self._segment = Segment.create(name, Layout.of(address.size))
        self._memory = GroupMemory(self._segment)
        self._subgroups: list[GroupOwner] = []

    def address(self, rank: int) -> GroupAddress:
        return attrs.evolve(self._address, rank=rank)

    def subgroup(self, members: tuple[int, ...]) -> GroupOwner:
        """Make a segment of its own: ranks that are in no call of a subgroup are not waited for there."""
        require_members(members, self.size)
        chosen = tuple((self._address.members or range(self.size))[member] for member in members)
        address = attrs.evolve(self._address, size=len(members), members=chosen)
        made = _AloneOwner(attrs.evolve(address, name="")) if len(members) == 1 else _SharedMemoryOwner(address)
        self._subgroups.append(made)
        return made

    def progress(self) -> tuple[RankProgress, ...]:
        return tuple(self._memory.progress(rank) for rank in range(self.size))

    def abort(self, reason: str = "") -> None:
        """Wake all ranks of this group and of its subgroups."""
        self._memory.end(self.size, reason)
        for group in self._subgroups:
            group.abort(reason)

    def opened(self) -> None:
        """Remove the names of the segments: from now on the kernel frees the memory with the last process that has it mapped."""
        self.unlink()

    def unlink(self) -> None:
        self._segment.unlink()
        for group in self._subgroups:
            group.unlink()
