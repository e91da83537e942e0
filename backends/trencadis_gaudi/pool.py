"""Access of connectors to KV blocks in copies of a few sizes, so that no size is compiled while a request waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from trencadis.interfaces import KVPool
from trencadis.records import KVLayout
from trencadis_gaudi.flat_cache import FlatKVCache
from trencadis_gaudi.habana import Habana
from trencadis_torch.device import to_device

__all__ = ["GaudiPool", "pieces"]

_SIZES = (32, 8, 1)
"""Numbers of blocks in one copy."""


def pieces(num_blocks: int) -> Iterator[slice]:
    """Yield slices of a list of blocks, each with one of a few sizes. Pure."""
    at = 0
    for size in _SIZES:
        while num_blocks - at >= size:
            yield slice(at, at + size)
            at += size


class GaudiPool(KVPool):
    """Copies blocks of one cache on the backend's thread, since operations of another thread would form another graph in lazy mode.

    Args:
        cache: Cache to read and write.
        habana: Device of the cache.
    """

    any_thread = False

    def __init__(self, cache: FlatKVCache, habana: Habana) -> None:
        self._cache = cache
        self._habana = habana

    @property
    def layout(self) -> KVLayout:
        """Layout of the cache."""
        return self._cache.layout

    @torch.inference_mode()
    def read_blocks(self, blocks: Sequence[int], out: NDArray[np.uint8]) -> None:
        """Copy blocks to host memory; as in the base class."""
        with self._habana.active():
            self._habana.mark_step()  # a separate recipe from the step's pending operations
            for piece in pieces(len(blocks)):
                gathered = self._cache.gather(self._ids(blocks[piece]))
                self._habana.mark_step()
                # Viewed as bytes on the host, since a Gaudi may not support such views.
                rows = [part.cpu().flatten(1).view(torch.uint8).numpy() for part in gathered]
                np.concatenate(rows, axis=1, out=out[piece])

    @torch.inference_mode()
    def write_blocks(self, blocks: Sequence[int], data: NDArray[np.uint8]) -> None:
        """Copy blocks from host memory; as in the base class."""
        with self._habana.active():
            self._habana.mark_step()
            for piece in pieces(len(blocks)):
                contents = tuple(part.to(self._habana.device) for part in self._parts(data[piece]))
                self._cache.scatter(self._ids(blocks[piece]), contents)
                self._habana.mark_step()
            self._habana.hpu.synchronize()

    def warm_up(self) -> None:
        """Copy the padding block out and back in each size."""
        for size in _SIZES:
            padding = [self._cache.padding_block] * size
            data = np.zeros((size, self.layout.block_bytes), np.uint8)
            self.read_blocks(padding, data)
            self.write_blocks(padding, data)

    def _parts(self, data: NDArray[np.uint8]) -> Iterator[torch.Tensor]:
        """Yield the contents of each part of the cache, on the host."""
        start = 0
        for part in self._cache.parts:
            shape = (len(data), *part.shape[1:])
            end = start + part[0].numel() * part.element_size()
            # A copy, since the caller's memory may be read-only, which tensors do not support.
            yield torch.from_numpy(data[:, start:end].copy()).view(part.dtype).view(shape)
            start = end

    def _ids(self, blocks: Sequence[int]) -> torch.Tensor:
        return to_device(np.asarray(blocks, np.int64), self._habana.device)
