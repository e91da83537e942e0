"""A group of ranks as its owner has it, and the address that a rank opens it with."""

from __future__ import annotations

from abc import ABC, abstractmethod

import attrs

from trencadis.errors import CollectiveError
from trencadis_plugins.executor.collectives.group_memory import RankProgress

__all__ = ["GroupAddress", "GroupOwner", "require_members"]


@attrs.frozen(kw_only=True)
class GroupAddress:
    """What a rank process needs to take its place in a group; plain values, to be sent.

    Attributes:
        kind: Library of the collectives, such as ``gloo``.
        name: Name of the segment in ``/dev/shm``; for the other kinds where ranks meet: ``tcp://host:port`` or ``file:///path``.
        rank: Place in the group.
        size: Ranks in the group.
        generation: Counts up when the ranks are started again, so that no late rank of before meets those of now.
        timeout_s: For which a rank waits for another, in seconds.
        members: Ranks of the world that are in this group, in order; empty: it is the world.
        num_processes: That share this machine's cores, with this one; 0: as many as ranks. With more of them than cores a rank that
            waits sleeps at once.
    """

    kind: str
    name: str
    rank: int
    size: int
    generation: int
    timeout_s: float
    members: tuple[int, ...] = ()
    num_processes: int = 0


class GroupOwner(ABC):
    """A group as its owner has it, who is no rank.

    Attributes:
        size: Ranks in the group.
    """

    size: int

    @abstractmethod
    def address(self, rank: int) -> GroupAddress:
        """Return what a rank opens the group with."""

    @abstractmethod
    def subgroup(self, members: tuple[int, ...]) -> GroupOwner:
        """Return a group of some of these ranks, in ascending order; it is unlinked with this one.

        Raises:
            CollectiveError: They are not in this group, or not in order.
        """

    @abstractmethod
    def progress(self) -> tuple[RankProgress, ...]:
        """Return what each rank did last; nothing where that cannot be seen from here."""

    @abstractmethod
    def abort(self, reason: str = "") -> None:
        """Let waiting and later calls of all ranks raise, where that can be done from here; see the kind."""

    @abstractmethod
    def opened(self) -> None:
        """Remove names that no rank needs once every rank has opened the group and its subgroups."""

    @abstractmethod
    def unlink(self) -> None:
        """Remove what is left in the file system; ranks that have opened the group go on. May be called twice."""


def require_members(members: tuple[int, ...], size: int) -> None:
    """Raise unless ranks are some of a group's, in ascending order.

    Raises:
        CollectiveError: They are not.
    """
    if not members or list(members) != sorted(set(members) & set(range(size))):
        raise CollectiveError(f"A subgroup has some of the ranks 0 to {size - 1}, in ascending order, not {members}.")
