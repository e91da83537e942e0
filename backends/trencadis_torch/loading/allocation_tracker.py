"""Counts what tensors hold while something runs: exact, whatever the allocator keeps of what was freed before."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["LiveBytes"]


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """As a context, counts storages that operations of this thread make, until nothing holds them any more.

    Views and operations in place make none. Buffers inside a kernel are not seen.

    Attributes:
        now: Bytes that live.
        peak: The most that lived at once.

    Source: storages are followed by weak references, as in ``torch.distributed._tools.mem_tracker`` of PyTorch.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation and note what it made."""
        options = kwargs or {}
        result = func(*args, **options)
        given = {storage.data_ptr() for storage in _storages((args, options))}
        for storage in _storages(result):
            if storage not in self._known and storage.data_ptr() not in given:
                self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        self._known.add(storage)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, size).atexit = False

    def _drop(self, size: int) -> None:
        self.now -= size


def _storages(values: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
