"""Sums, gathers and messages between the ranks of a group; an executor makes them and hands them to backends.

Every rank of a group makes the same calls in the same order, with tensors of the same shape and dtype, from one thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import attrs

from trencadis.records import ParallelLayout

if TYPE_CHECKING:
    import torch

__all__ = ["Collective", "RankGroups"]


class Collective(ABC):
    """The ranks of one group, seen from one of them.

    Every call but ``abort`` blocks until it is done, on a CPU, or until it is in the device's stream. What waits for a rank that
    ended, or longer than the group's timeout, raises.

    Attributes:
        rank: Place in the group, 0 .. size - 1.
        size: Ranks in the group.
    """

    rank: int
    size: int

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by its sum over the ranks, the same bits on every rank.

        Args:
            tensor: Contiguous, of a floating dtype or an integer one. Of 16-bit floats the sum is kept in float32 and rounded once.

        Raises:
            CollectiveError: A rank ended, stopped, or called something else.
        """

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks one after the other along the last dimension, in the order of ranks.

        Raises:
            CollectiveError: The ranks do not call the same, or one of them has ended; see ``all_reduce``.
        """

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, *, source: int = 0) -> None:
        """Overwrite a tensor with that of one rank.

        Args:
            tensor: Contiguous.
            source: Rank within the group.

        Raises:
            CollectiveError: The ranks do not call the same, or one of them has ended; see ``all_reduce``.
        """

    @abstractmethod
    def send(self, tensor: torch.Tensor, *, target: int) -> None:
        """Hand a tensor to another rank, which calls ``receive``; may return before it does.

        Raises:
            CollectiveError: The ranks do not call the same, or one of them has ended; see ``all_reduce``.
        """

    @abstractmethod
    def receive(self, tensor: torch.Tensor, *, source: int) -> None:
        """Overwrite a tensor with the next that a rank sent here.

        Raises:
            CollectiveError: The ranks do not call the same, or one of them has ended; see ``all_reduce``.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank has called this.

        Raises:
            CollectiveError: The ranks do not call the same, or one of them has ended; see ``all_reduce``.
        """

    @abstractmethod
    def abort(self) -> None:
        """Let calls that wait on any rank raise, now and from now on. From any thread; returns at once; may be called twice."""

    @abstractmethod
    def close(self) -> None:
        """Free what the group holds; not used again. May be called twice."""


@attrs.frozen(kw_only=True)
class RankGroups:
    """Where a backend stands among others, and how it reaches them.

    Attributes:
        layout: Layout of the replica.
        rank: Rank within the replica, 0 .. ``layout.num_ranks`` - 1.
        tensor: The ranks of this one's stage.
        world: All ranks of the replica; its ranks are those of the replica. Between stages, for ``send``, ``receive`` and
            ``broadcast``.
    """

    layout: ParallelLayout
    rank: int
    tensor: Collective
    world: Collective

    @property
    def is_output(self) -> bool:
        """Whether this rank samples."""
        return self.rank == self.layout.output_rank
