"""A gloo group between hosts beside the HCCL group, whose collectives only accept tensors of the device.

It carries sizes, decisions and the check's forward on the CPU: little data, rarely.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist

from trencadis.errors import CollectiveError
from trencadis.interfaces import Collective

__all__ = ["HostGroup"]

_MOST_S: Final = 900.0
"""Timeout, seconds; long, since a rank may compile for minutes, while the end of a process is noticed at once."""


class HostGroup(Collective):
    """Gloo group over all ranks of the existing process group of torch.distributed.

    Args:
        rank: Rank of this process.
        size: Number of ranks.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._is_aborted = False
        self._group: Any = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=_MOST_S))

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by the sum over ranks, added in the order of ranks."""
        parts = self._parts(tensor)
        total = parts[0].float() if tensor.dtype.itemsize == 2 and tensor.is_floating_point() else parts[0]
        for part in parts[1:]:
            total += part
        tensor.copy_(total)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks along the last dimension."""
        return torch.cat(self._parts(tensor), dim=-1)

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0) -> None:
        """Overwrite a tensor with that of one rank."""
        self._call(lambda: dist.broadcast(_bytes(tensor), source, group=self._group))

    def send(self, tensor: torch.Tensor, *, target: int) -> None:
        """Send a tensor to a rank."""
        self._call(lambda: dist.send(_bytes(tensor.contiguous()), target, group=self._group))

    def receive(self, tensor: torch.Tensor, *, source: int) -> None:
        """Overwrite a tensor with the next one sent by a rank."""
        self._call(lambda: dist.recv(_bytes(tensor), source, group=self._group))

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._call(lambda: dist.barrier(self._group))

    def abort(self) -> None:
        """Make later calls raise; a waiting call raises when a process ends."""
        self._is_aborted = True

    def close(self) -> None:
        """Leave the group; may be called twice."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            with contextlib.suppress(RuntimeError, ValueError, AssertionError):
                dist.destroy_process_group(group)

    def _parts(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        own = tensor.contiguous()
        parts = [torch.empty_like(own) for _ in range(self.size)]
        self._call(lambda: dist.all_gather([_bytes(part) for part in parts], _bytes(own), group=self._group))
        return parts

    def _call(self, run: Callable[[], object]) -> None:
        if self._is_aborted or self._group is None:
            raise CollectiveError(
                f"Rank {self.rank}: the group of the hosts was {'aborted' if self._is_aborted else 'closed'}."
            )
        try:
            run()
        except RuntimeError as error:
            self._is_aborted = True
            raise CollectiveError(f"Rank {self.rank}: the hosts do not reach each other: {error}") from error


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as bytes, since gloo does not support every dtype."""
    return tensor.view(-1).view(torch.uint8)
