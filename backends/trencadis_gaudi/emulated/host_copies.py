"""Non-blocking copies to the host, whose target holds garbage until they complete."""

from __future__ import annotations

import threading
from collections import deque

import torch

__all__ = ["HostCopies"]


class HostCopies:
    """Copies of one device, in order of start. Thread-safe.

    Attributes:
        num_started: Number of copies started so far, which is a position in the stream.
    """

    def __init__(self) -> None:
        self.num_started = 0
        self._pending: deque[tuple[int, torch.Tensor, torch.Tensor]] = deque()
        self._lock = threading.Lock()

    def start(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Fill ``target`` with garbage, which completion replaces by the current content of ``source``; return ``target``."""
        with self._lock:
            self.num_started += 1
            self._pending.append((self.num_started, target, source.clone()))
        return target.fill_(garbage(target.dtype))

    def finish(self, position: int | None = None) -> None:
        """Complete the copies up to a position, or all of them."""
        with self._lock, torch.inference_mode():
            while self._pending and (position is None or self._pending[0][0] <= position):
                _, target, source = self._pending.popleft()
                target.copy_(source)


def garbage(dtype: torch.dtype) -> float | int | bool:
    """Return an improbable value of a type. Pure."""
    if dtype.is_floating_point:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).max // 3
