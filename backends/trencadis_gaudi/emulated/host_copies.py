"""Copies to the host that do not wait: until their moment has come, the host finds garbage in them."""

from __future__ import annotations

import threading
from collections import deque

import torch

__all__ = ["HostCopies"]


class HostCopies:
    """Copies of one device, in the order of their start. Any thread.

    Attributes:
        num_started: Copies started so far, which is a position in the stream.
    """

    def __init__(self) -> None:
        self.num_started = 0
        self._pending: deque[tuple[int, torch.Tensor, torch.Tensor]] = deque()
        self._lock = threading.Lock()

    def start(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Fill ``target`` with garbage, to be replaced by what is in ``source`` now; returns ``target``."""
        with self._lock:
            self.num_started += 1
            self._pending.append((self.num_started, target, source.clone()))
        return target.fill_(garbage(target.dtype))

    def finish(self, position: int | None = None) -> None:
        """Let the copies up to a position arrive, or all of them."""
        with self._lock, torch.inference_mode():
            while self._pending and (position is None or self._pending[0][0] <= position):
                _, target, source = self._pending.popleft()
                target.copy_(source)


def garbage(dtype: torch.dtype) -> float | int | bool:
    """Return a value that no result is likely to have. Pure."""
    if dtype.is_floating_point:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).max // 3
