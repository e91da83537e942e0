"""The cache of a fake backend as a pool of blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trencadis.interfaces import KVPool
from trencadis.records import KVLayout, KVPart

__all__ = ["FakeKVCache"]


class FakeKVCache(KVPool):
    """Arrays with one 8-byte entry per slot, such as states, tokens and positions, each a layer; a sequence of them, too.

    Args:
        arrays: Each ``[num_blocks * block_size]``; shared, not copied.
        block_size: Tokens per block.
        numerics: See :class:`KVLayout`.
    """

    layerwise = True

    def __init__(self, arrays: Sequence[NDArray[Any]], *, block_size: int, numerics: str = "fake") -> None:
        self._arrays = tuple(arrays)
        self._bytes = [array.view(np.uint8).reshape(-1, block_size * array.itemsize) for array in self._arrays]
        self._layout = KVLayout(
            parts=tuple(
                KVPart(
                    layer=i,
                    kind=f"array {i}",
                    num_heads=1,
                    head_dim=1,
                    dtype=array.dtype.name,
                    item_bytes=array.itemsize,
                )
                for i, array in enumerate(self._arrays)
            ),
            block_size=block_size,
            last_head=1,
            numerics=numerics,
        )

    @property
    def layout(self) -> KVLayout:
        """One part per array."""
        return self._layout

    def read_blocks(self, blocks: Sequence[int], out: NDArray[np.uint8]) -> None:
        """Copy blocks, one array after another."""
        out[:] = np.concatenate([array[list(blocks)] for array in self._bytes], axis=1)

    def write_blocks(self, blocks: Sequence[int], data: NDArray[np.uint8]) -> None:
        """Copy blocks back."""
        start = 0
        for array in self._bytes:
            array[list(blocks)] = data[:, start : start + array.shape[1]]
            start += array.shape[1]

    def read_layer(self, layer: int, blocks: Sequence[int], out: NDArray[np.uint8]) -> None:
        """Copy blocks of one array."""
        out[:] = self._bytes[layer][list(blocks)]

    def write_layer(self, layer: int, blocks: Sequence[int], data: NDArray[np.uint8]) -> None:
        """Copy blocks of one array back."""
        self._bytes[layer][list(blocks)] = data

    def __getitem__(self, index: int) -> NDArray[Any]:
        return self._arrays[index]

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)
