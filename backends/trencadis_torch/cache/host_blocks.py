"""KV blocks in host memory, and their copies out of the cache and back, for preemption by swap.

    cache ──gather──▶ a few blocks side by side ──copy──▶ neighbours in host memory      and the other way round

Only a few blocks are gathered at once: swaps are made when the device's memory is full.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import torch

from trencadis.errors import OutOfMemoryError
from trencadis.interfaces import BlockCopies
from trencadis.records import Int32Array
from trencadis_torch.cache.kv_cache import PagedKVCache
from trencadis_torch.device import to_device

__all__ = ["HostBlocks", "runs"]

_GATHERED_BYTES = 64 * 2**20
"""Device memory that one copy may take beside the cache."""

Gather = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
Scatter = Callable[[torch.Tensor, tuple[torch.Tensor, ...]], object]


class HostBlocks:
    """Host memory for some blocks of a cache. Copies run in the calling thread, after the device's earlier work.

    Args:
        cache: Whose blocks.
        num_blocks: How many the host holds; 0: nothing can be swapped.
        gather: ``cache.gather``, or a captured or compiled form of it.
        scatter: ``cache.scatter``, the same.
        most: Most blocks in one call of these; 0: as many as 64 MiB hold.
        pins: Pin the memory where the device copies faster from there.

    Raises:
        OutOfMemoryError: The host has no room.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        *,
        num_blocks: int,
        gather: Gather | None = None,
        scatter: Scatter | None = None,
        most: int = 0,
        pins: bool = True,
    ) -> None:
        self.num_blocks = num_blocks
        self._device = cache.device
        self._gather = gather or cache.gather
        self._scatter = scatter or cache.scatter
        block_bytes = cache.block_size * sum(layer.bytes_per_token for layer in cache.layers)
        self._most = most or max(1, _GATHERED_BYTES // block_bytes)
        # On a CUDA stream copies that do not wait are in order with each other; elsewhere nobody promises it.
        self._non_blocking = cache.device.type == "cuda"
        try:
            self._host = tuple(_host_tensor(part, num_blocks, pins=pins and num_blocks > 0) for part in cache.parts)
        except (RuntimeError, MemoryError) as error:
            raise OutOfMemoryError(
                f"The host has no room for {num_blocks} blocks of preempted sequences, "
                f"{num_blocks * block_bytes / 2**20:.0f} MiB: {error}.",
                hint='Lower cache.swap_bytes, or set engine.preemption to "recompute".',
            ) from error

    def swap(self, *, outs: BlockCopies, ins: BlockCopies) -> None:
        """Copy blocks out, then blocks in; see ``Backend.swap_blocks``."""
        for at, first, count in runs(outs.targets, most=self._most):
            gathered = self._gather(self._ids(outs.sources[at : at + count]))
            for host, part in zip(self._host, gathered, strict=True):
                host[first : first + count].copy_(part, non_blocking=self._non_blocking)
        for at, first, count in runs(ins.sources, most=self._most):
            contents = tuple(
                host[first : first + count].to(self._device, non_blocking=self._non_blocking) for host in self._host
            )
            self._scatter(self._ids(ins.targets[at : at + count]), contents)

    def _ids(self, blocks: Int32Array) -> torch.Tensor:
        return to_device(blocks.astype(np.int64), self._device)


def runs(blocks: Int32Array, *, most: int) -> Iterator[tuple[int, int, int]]:
    """Yield runs of consecutive ids: where each begins, its first id, and how many they are. Pure.

    Args:
        blocks: int32 ``[n]``.
        most: Longest run.
    """
    if not len(blocks):
        return
    breaks = np.flatnonzero(np.diff(blocks) != 1) + 1
    bounds = [0, *breaks.tolist(), len(blocks)]
    for begin, end in itertools.pairwise(bounds):
        for at in range(begin, end, most):
            yield at, int(blocks[at]), min(most, end - at)


def _host_tensor(part: torch.Tensor, num_blocks: int, *, pins: bool) -> torch.Tensor:
    """Return host memory for blocks of one part of the cache.

    Source: ``torch.Tensor.pin_memory`` (PyTorch), with "hpu" for a Gaudi.
    """
    shape = (num_blocks, *part.shape[1:])
    if part.device.type == "cuda":
        return torch.empty(shape, dtype=part.dtype, pin_memory=pins)
    host = torch.empty(shape, dtype=part.dtype)
    return host.pin_memory("hpu") if part.device.type == "hpu" and pins else host
