"""Facts that every rank must see alike: a sum of ones, buckets, and decisions that each would take from its own memory and clock."""

from __future__ import annotations

import hashlib
import itertools
from typing import Final

import torch

from trencadis.errors import BackendError, StepFailedError
from trencadis.interfaces import Collective
from trencadis.records import Bucket, Phase, UnifiedBucket

__all__ = ["ONE_RANK", "Agreement", "check_sums"]


class Agreement:
    """Decisions of all ranks together. Every rank asks the same, in the same order.

    Args:
        group: The ranks; None: there is one, which agrees with itself.
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
        """Return a digest of the ranks' digests, in hexadecimal; empty if they are."""
        if self._group is None or not digest:
            return digest
        rows = _gathered(list(bytes.fromhex(digest)), self._group)
        return hashlib.blake2b(bytes(itertools.chain(*rows)), digest_size=16).hexdigest()

    def check_bucket(self, bucket: Bucket) -> None:
        """See that all ranks run a pass in the same bucket; else they would exchange tensors of different shapes.

        Raises:
            StepFailedError: On every rank, naming those that differ from the first.
        """
        if self._group is None:
            return
        rows = _gathered(_sizes(bucket), self._group)
        others = [rank for rank, row in enumerate(rows) if row != rows[0]]
        if others:
            told = ", ".join(f"rank {rank} has {tuple(rows[rank])}" for rank in others)
            raise StepFailedError(
                f"backend gaudi: the ranks run a pass in different buckets: rank 0 has {tuple(rows[0])}, {told} (is_decode, batch_size, "
                "query_len, num_blocks; of a unified one num_unique_blocks, is_causal).",
            )


ONE_RANK: Final = Agreement()
"""That of a backend without others."""


def _sizes(bucket: Bucket) -> list[int]:
    sizes = [int(bucket.phase is Phase.DECODE), bucket.batch_size, bucket.query_len, bucket.num_blocks]
    return [*sizes, bucket.num_unique_blocks, int(bucket.is_causal)] if isinstance(bucket, UnifiedBucket) else sizes


def _gathered(numbers: list[int], group: Collective) -> list[list[int]]:
    """Return the numbers of every rank, exchanged between the hosts."""
    gathered: list[int] = group.all_gather(torch.tensor(numbers)).tolist()
    return [gathered[first : first + len(numbers)] for first in range(0, len(gathered), len(numbers))]


def check_sums(group: Collective, device: torch.device) -> None:
    """See that what ranks exchange arrives: a sum of ones is the number of ranks, and a gather has each rank's number in its place.

    Args:
        group: For tensors of the device and, to compare what each rank got, of the host.
        device: Of the exchange under test.

    Raises:
        BackendError: On every rank, naming those from which or to which something wrong came.

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
