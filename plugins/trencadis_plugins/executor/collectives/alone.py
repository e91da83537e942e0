"""A group of one rank."""

from __future__ import annotations

import torch

from trencadis.errors import CollectiveError
from trencadis.interfaces import Collective

__all__ = ["Alone"]


class Alone(Collective):
    """A group of one rank: sums, gathers and broadcasts leave tensors as they are; ``send`` and ``receive`` raise.

    Aborted, it raises as every other group does.
    """

    def __init__(self) -> None:
        self.rank = 0
        self.size = 1
        self._is_aborted = False

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Leave a tensor as it is."""
        self._check()

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself."""
        self._check()
        return tensor

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0) -> None:
        """Leave a tensor as it is."""
        self._check(source)

    def send(self, tensor: torch.Tensor, *, target: int) -> None:
        """Raise: there is no other rank."""
        self._check(target)
        raise CollectiveError("A group of one rank has no other rank to send to.")

    def receive(self, tensor: torch.Tensor, *, source: int) -> None:
        """Raise: there is no other rank."""
        self._check(source)
        raise CollectiveError("A group of one rank has no other rank to receive from.")

    def barrier(self) -> None:
        """Return."""
        self._check()

    def abort(self) -> None:
        """Let later calls raise."""
        self._is_aborted = True

    def close(self) -> None:
        """Do nothing."""

    def _check(self, other: int = 0) -> None:
        if self._is_aborted:
            raise CollectiveError("The group of one rank was aborted.")
        if other != 0:
            raise CollectiveError(f"Rank {other} is not in a group of one rank.")
