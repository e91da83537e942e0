"""Common decisions of ranks with separate memory and clocks, and the check of collectives at the start."""

from __future__ import annotations

import hashlib
import itertools
from typing import Final

import torch

from trencadis.errors import BackendError
from trencadis.interfaces import Collective

__all__ = ["ONE_RANK", "Agreement", "check_sums"]


class Agreement:
    """Common decisions of all ranks. Every rank must make the same calls in the same order.

    Args:
        group: Group of the ranks; None: there is one rank.
    """

    def __init__(self, group: Collective | None = None) -> None:
        self._group = group

    def least(self, number: int) -> int:
        """Return the smallest of the ranks' numbers."""
        return number if self._group is None else min(row[0] for row in _gathered([number], self._group))

    def most(self, number: int) -> int:
        """Return the largest of the ranks' numbers."""
        return -self.least(-number)

    def all_hold(self, holds: bool) -> bool:
        """Return whether something holds on every rank."""
        return bool(self.least(int(holds)))

    def common(self, digest: str) -> str:
        """Return a digest of the ranks' digests, in hexadecimal; empty if these are empty."""
        if self._group is None or not digest:
            return digest
        rows = _gathered(list(bytes.fromhex(digest)), self._group)
        return hashlib.blake2b(bytes(itertools.chain(*rows)), digest_size=16).hexdigest()


ONE_RANK: Final = Agreement()
"""Agreement of a single rank."""


def _gathered(numbers: list[int], group: Collective) -> list[list[int]]:
    """Return the numbers of all ranks, exchanged between hosts."""
    gathered: list[int] = group.all_gather(torch.tensor(numbers)).tolist()
    return [gathered[first : first + len(numbers)] for first in range(0, len(gathered), len(numbers))]


def check_sums(group: Collective, device: torch.device) -> None:
    """Check the collectives: a sum of ones is the number of ranks, and a gather returns each rank's number in its place.

    Args:
        group: Group for tensors of the device, and of the host to compare the results of ranks.
        device: Device of the collectives under test.

    Raises:
        BackendError: A result is wrong, raised on every rank; the message names sending and receiving ranks.

    Source: vllm-gaudi 091bbadd, v1/worker/hpu_worker.py, init_worker_distributed_environment (the sum of ones).
    """
    ones = torch.ones(1).to(device)
    group.all_reduce(ones)
    numbers = group.all_gather(torch.tensor([1.0 + group.rank]).to(device))
    expected = [float(group.size), *(1.0 + rank for rank in range(group.size))]
    rows = group.all_gather(torch.cat([ones.cpu(), numbers.cpu()])[:, None]).mT.tolist()
    wrong = [rank for rank, row in enumerate(rows) if row != expected]
    if wrong:
        got = "; ".join(
            f"rank {rank} got {rows[rank][0]:g}, {', '.join(f'{one:g}' for one in rows[rank][1:])}" for rank in wrong
        )
        raise BackendError(
            f"The ranks do not reach each other. A sum of ones is {group.size}, and a gather of their numbers 1 to {group.size}; {got}.",
            hint="See hl-smi for the links of the cards, and HABANA_VISIBLE_MODULES for which of them are used; "
            '"trencadis gaudi-check --only all-reduce" tries each.',
        )
