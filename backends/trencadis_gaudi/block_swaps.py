"""Copies of KV blocks in a few sizes, so that no size is compiled while a request waits.

A defragmenter copies within the device, padded to thresholds; preemption by swap copies to host memory and back, block by block.

Source: vllm-gaudi, extension/defragmentation.py (sizes, padding, warm-up).
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch

from trencadis.interfaces import BlockCopies
from trencadis.records import Int32Array
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.habana import Habana
from trencadis_torch.cache.host_blocks import HostBlocks
from trencadis_torch.cache.kv_cache import PagedKVCache
from trencadis_torch.device import to_device

__all__ = ["THRESHOLDS", "BlockSwaps", "padded_length"]

logger = logging.getLogger("trencadis.gaudi")

THRESHOLDS = (8, 16, 32, 64, 128, 256, 512)
"""Pairs of blocks that are swapped in one call; each pair is two copies."""


def padded_length(num_copies: int) -> int:
    """Return the padded number of copies: twice the smallest threshold that covers ``num_copies``. Pure.

    Beyond the largest threshold it is the next power of two, which is not warmed up.
    """
    for threshold in THRESHOLDS:
        if num_copies <= 2 * threshold:
            return 2 * threshold
    return 1 << (num_copies - 1).bit_length()


class _Copies(torch.nn.Module):
    """The copies as a module, since only modules can be captured."""

    def __init__(self, cache: PagedKVCache) -> None:
        super().__init__()
        self._cache = cache

    def forward(self, sources: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self._cache.copy_blocks(sources, targets)
        return targets


class BlockSwaps:
    """Copies blocks of one cache.

    Args:
        cache: Cache whose blocks are copied.
        config: Configuration, which decides whether copies are captured or compiled.
        habana: Device of the cache.
        num_host_blocks: Number of blocks in host memory.

    Raises:
        OutOfMemoryError: Host memory has no room for the blocks.
    """

    def __init__(self, cache: PagedKVCache, config: GaudiConfig, habana: Habana, *, num_host_blocks: int = 0) -> None:
        self._cache = cache
        self._habana = habana
        self._copies: Any = _Copies(cache)
        self._host_blocks = HostBlocks(
            cache,
            num_blocks=num_host_blocks,
            gather=self._gather,
            scatter=self._scatter,
            most=1,
            pins=habana.emulated is None,
        )
        if config.swaps_in_graphs and config.mode == "lazy":
            self._copies = habana.hpu.wrap_in_hpu_graph(self._copies, disable_tensor_cache=True)
        elif config.swaps_in_graphs and config.mode == "compile":
            self._copies = torch.compile(self._copies, backend=habana.compiler, fullgraph=True, dynamic=False)

    def copy(self, sources: Int32Array, targets: Int32Array) -> None:
        """Copy blocks; every source is read before any target is written. Padding copies the padding block onto itself."""
        padded = np.full((2, padded_length(len(sources))), self._cache.padding_block, np.int64)
        padded[:, : len(sources)] = sources, targets
        pair = [to_device(ids, self._cache.device) for ids in padded]
        self._habana.mark_step()
        self._copies(*pair)
        self._habana.mark_step()

    def swap(self, *, outs: BlockCopies, ins: BlockCopies) -> None:
        """Copy blocks to host memory and back one by one, so that any number of blocks has the same shape."""
        self._habana.mark_step()
        self._host_blocks.swap(outs=outs, ins=ins)

    def _gather(self, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gathered = self._cache.gather(blocks)
        self._habana.mark_step()
        return gathered

    def _scatter(self, blocks: torch.Tensor, contents: tuple[torch.Tensor, ...]) -> None:
        self._cache.scatter(blocks, contents)
        self._habana.mark_step()

    def warm_up_host(self) -> None:
        """Copy the padding block out and back, if there is host memory for blocks."""
        if self._host_blocks.num_blocks:
            first, padding = np.zeros(1, np.int32), np.full(1, self._cache.padding_block, np.int32)
            self.swap(outs=BlockCopies(sources=padding, targets=first), ins=BlockCopies(sources=first, targets=padding))

    def warm_up(self) -> int:
        """Swap two blocks once for each size, an even number of times in total; return the number of swaps."""
        num_blocks = self._cache.num_blocks + 1
        logger.info("Warming up defragmenter with thresholds: %s", list(THRESHOLDS))
        if self._cache.num_blocks < 2:
            logger.warning("Skipping defragmenter warmup, insufficient blocks (%s)", num_blocks)
            return 0
        sizes = THRESHOLDS + THRESHOLDS[: len(THRESHOLDS) % 2]
        for threshold in sizes:
            self._swap_two(threshold)
        logger.info("Defragmenter warmup completed successfully")
        return len(sizes)

    def _swap_two(self, threshold: int) -> None:
        # Copies of the padding block fill the call up to its size.
        padding = np.full(2 * threshold - 2, self._cache.padding_block, np.int32)
        there, back = np.array([1, 0], np.int32), np.array([0, 1], np.int32)
        self.copy(np.concatenate([there, padding]), np.concatenate([back, padding]))
