"""Blocks that are transferred layer by layer: sending them, and waiting for each layer in the step that reads them.

    producer  layer 0 of all blocks ─▶ layer 1 of all blocks ─▶ …
    consumer  step: wait(0) ▸ compute layer 0 ▸ wait(1) ▸ compute layer 1 ▸ …      while the later layers are on their way

Each layer of each block is an object of its own: verified by itself, and only then written to the device.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import attrs
import numpy as np

from trencadis.records import KVLayout
from trencadis_kv.store.format import HEADER_BYTES, for_block, for_layer, seal_header, start_header
from trencadis_kv.store.pool_access import PoolAccess
from trencadis_kv.wire.handshake import Identity
from trencadis_kv.wire.stream import FrameStream, block_head
from trencadis_kv.wire.stream_messages import Layers

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Arrivals", "LayerSink", "send_layers"]

_BATCH_BYTES: Final = 1 << 19
"""Copied at once between pool and socket."""


@attrs.frozen(kw_only=True)
class LayerSink:
    """Where a pull puts layers.

    Attributes:
        layout: Of the blocks.
        take: Called with a layer, the index of a block and verified rows ``[n, layer bytes]`` from there on, which are overwritten
            afterwards.
    """

    layout: KVLayout
    take: Callable[[int, int, NDArray[np.uint8]], None]


class Arrivals:
    """Which layers of one pull are in their blocks. The pull's thread tells, the backend's waits.

    Args:
        layers: That are to come.
    """

    def __init__(self, layers: Iterable[int]) -> None:
        self._missing = set(layers)
        self._changed = threading.Condition()
        self._has_ended = self._is_given_up = False

    @property
    def are_all_there(self) -> bool:
        """Whether every layer came, and none too late."""
        with self._changed:
            return not self._missing and not self._is_given_up

    def came(self, layer: int) -> None:
        """Called when a layer of all blocks is verified and written."""
        with self._changed:
            self._missing.discard(layer)
            self._changed.notify_all()

    def end(self, *, is_complete: bool) -> None:
        """Called when nothing more will come.

        Args:
            is_complete: Because all is there.
        """
        with self._changed:
            self._has_ended = True
            if is_complete:
                self._missing.clear()
            self._changed.notify_all()

    def wait(self, layer: int, *, until_s: float) -> bool:
        """Return whether a layer is there, as soon as that is known; if not, the whole load counts as missing from then on.

        Args:
            layer: Which.
            until_s: The latest time to return, of ``time.monotonic``.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: layer not in self._missing or self._has_ended, max(0.0, until_s - time.monotonic())
            )
            self._is_given_up |= layer in self._missing
            return not self._is_given_up


def send_layers(
    stream: FrameStream,
    pool: PoolAccess,
    identity: Identity,
    index: Mapping[bytes, int],
    hashes: Sequence[bytes],
    *,
    timeout_s: float,
) -> int:
    """Send blocks layer by layer; returns the bytes of it.

    Args:
        stream: To who asked for it.
        pool: Where the blocks are.
        identity: Of this engine.
        index: From hashes to blocks.
        hashes: Of the blocks, in order; all are in ``index``.
        timeout_s: The longest wait for the device's thread.

    Raises:
        TransferError: As of the stream and the pool.
    """
    layout, codec, num_sent = pool.layout, identity.codec, 0
    draft = start_header(layout, compat=identity.compat, block_hash=bytes(32), codec_flags=codec.flags)
    stream.send(Layers())
    for layer in layout.layers:
        own_draft, size = for_layer(draft, layer), layout.layer_bytes(layer)
        rows = np.empty((max(1, min(len(hashes), _BATCH_BYTES // size)), size), np.uint8)
        for first in range(0, len(hashes), len(rows)):
            part = hashes[first : first + len(rows)]
            pool.read_layer(layer, [index[one] for one in part], rows[: len(part)], timeout_s=timeout_s)
            pieces: list[bytes | bytearray | memoryview] = []
            for block_hash, row in zip(part, rows, strict=False):
                own = for_block(own_draft, block_hash)
                sent = memoryview(codec.encode(row.data, own)).cast("B") if codec.flags else row.data
                pieces += (block_head(seal_header(own, sent), sent.nbytes), sent)
                num_sent += HEADER_BYTES + sent.nbytes
            stream.send_pieces(pieces)
    return num_sent
