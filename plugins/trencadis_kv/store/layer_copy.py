"""Layer-wise copy of blocks to host memory during the step that may overwrite them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from trencadis.interfaces import KVPool
from trencadis.records import KVLayout
from trencadis_kv.store.client import StoreClient

__all__ = ["LayerCopy", "layer_places"]

Places = Sequence[tuple[slice, slice]]


def layer_places(layout: KVLayout) -> dict[int, list[tuple[slice, slice]]]:
    """Return for each layer its parts: their places in a block's bytes and in the layer's bytes. Pure."""
    places: dict[int, list[tuple[slice, slice]]] = {layer: [] for layer in layout.layers}
    start = 0
    for part in layout.parts:
        size, of_layer = layout.block_size * part.token_bytes, places[part.layer]
        before = of_layer[-1][1].stop if of_layer else 0
        of_layer.append((slice(start, start + size), slice(before, before + size)))
        start += size
    return places


class LayerCopy:
    """A copy of some blocks to host memory. From any thread; a layer is copied by the first thread that needs it.

    It is also a task for a thread, which copies ahead of the step.

    Args:
        pool: KV blocks on the device.
        blocks: Ids of the blocks to copy.
        rows: Destination of each run of blocks: its first index in ``blocks``, and its memory, uint8 ``[n,
            block_bytes]``.
        places: Places of each layer's parts in the pool's layout, from :func:`layer_places`.

    Attributes:
        error: Exception of the pool, or None; after one, nothing more is copied.
        is_wanted: Always True: a save is never cancelled.
    """

    is_wanted = True

    def __init__(
        self,
        pool: KVPool,
        blocks: Sequence[int],
        rows: Sequence[tuple[int, NDArray[np.uint8]]],
        places: Mapping[int, Places],
    ) -> None:
        self._pool = pool
        self._blocks = blocks
        self._rows = rows
        self._left = dict(places)
        self._lock = threading.Lock()
        self.error: Exception | None = None

    def copy(self, layer: int) -> None:
        """Copy a layer, or wait for the thread that does; does not raise."""
        with self._lock:
            places = self._left.pop(layer, None)
            if places is None:
                return
            try:
                self._copy(layer, places)
            except Exception as error:
                self.error = error
                self._left.clear()

    def run(self, client: StoreClient) -> None:
        """Copy the remaining layers in order of computation; does not raise."""
        for layer in tuple(self._left):
            self.copy(layer)

    def give_up(self) -> None:
        """Stop copying; waits for a layer that is being copied."""
        with self._lock:
            self._left.clear()

    def _copy(self, layer: int, places: Places) -> None:
        size = places[-1][1].stop
        data = np.empty((len(self._blocks), size), np.uint8)
        self._pool.read_layer(layer, self._blocks, data)
        for index, rows in self._rows:
            for of_block, of_layer in places:
                rows[:, of_block] = data[index : index + len(rows), of_layer]
