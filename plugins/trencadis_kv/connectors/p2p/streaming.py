"""KV that is used while it arrives: layer by layer, or pushed after a prefill response.

Layer by layer, each layer of each block is an object of its own: verified by itself, and only then written to the device.

    producer  layer 0 of all blocks ─▶ layer 1 of all blocks ─▶ …
    consumer  step: wait(0) ▸ compute layer 0 ▸ wait(1) ▸ compute layer 1 ▸ …      while the later layers are on their way

Pushed blocks are received in memory set aside for them; nothing that arrives touches the device before the request has blocks there.
Blocks for which there is no memory are pulled.

    delegated ─▶ open: memory is set aside ─▶ the response comes ─▶ blocks come, each is verified ─▶ committed, broken off, or late
                                              └▶ the request takes them as they come ─▶ close: the memory is free
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import attrs
import numpy as np

from trencadis.errors import TransferError
from trencadis.records import KVLayout, TransferCause
from trencadis_kv.store.format import HEADER_BYTES, for_block, for_layer, seal_header, start_header
from trencadis_kv.store.pool_access import PoolAccess
from trencadis_kv.wire.handshake import Identity
from trencadis_kv.wire.stream import FrameStream, block_head
from trencadis_kv.wire.stream_messages import Layers

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Arrivals", "LayerSink", "Push", "Pushes", "send_layers"]

_BATCH_BYTES: Final = 1 << 19
"""Bytes copied at once between pool and socket."""


@attrs.frozen(kw_only=True)
class LayerSink:
    """Destination of the layers of a pull.

    Attributes:
        layout: KV layout of the blocks.
        take: Called with a layer, the index of a block and verified rows ``[n, layer bytes]`` from there on, which are overwritten
            afterwards.
    """

    layout: KVLayout
    take: Callable[[int, int, NDArray[np.uint8]], None]


class Arrivals:
    """Layers of one pull that have arrived. Written by the pull's thread, awaited by the backend's thread.

    Args:
        layers: Layers that are to come.
    """

    def __init__(self, layers: Iterable[int]) -> None:
        self._missing = set(layers)
        self._changed = threading.Condition()
        self._has_ended = self._is_given_up = False

    @property
    def are_all_there(self) -> bool:
        """Whether every layer arrived in time."""
        with self._changed:
            return not self._missing and not self._is_given_up

    def came(self, layer: int) -> None:
        """Called when a layer of all blocks is verified and written."""
        with self._changed:
            self._missing.discard(layer)
            self._changed.notify_all()

    def end(self, *, is_complete: bool) -> None:
        """Called when the pull has ended.

        Args:
            is_complete: Whether all layers arrived.
        """
        with self._changed:
            self._has_ended = True
            if is_complete:
                self._missing.clear()
            self._changed.notify_all()

    def wait(self, layer: int, *, until_s: float) -> bool:
        """Return whether a layer has arrived, waiting for it; if not, the whole load counts as failed.

        Args:
            layer: Index of the layer.
            until_s: Deadline, in the time of ``time.monotonic``.
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
    """Send blocks layer by layer; returns the number of bytes.

    Args:
        stream: Stream to the consumer.
        pool: Access to the blocks on the device.
        identity: Identity of this engine.
        index: Block ids by block hash.
        hashes: Hashes of the blocks, in order; all are in ``index``.
        timeout_s: Longest wait for the device's thread, seconds.

    Raises:
        TransferError: An error of the stream or of the pool.
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


class Push:
    """Pushed blocks of one prompt. One thread receives, one takes; the rest from any.

    Args:
        hashes: Hashes of the blocks, in order.
        block_bytes: Bytes per block.
        free: Called once with the number of bytes, when the memory is neither written nor read any more.

    Attributes:
        hashes: Hashes of the blocks, in order.
        error: Reason why the remaining blocks do not come; None while they may, and if all came.
    """

    def __init__(self, hashes: Sequence[bytes], block_bytes: int, *, free: Callable[[int], None]) -> None:
        self.hashes = tuple(hashes)
        self.error: TransferError | None = None
        self._rows: NDArray[np.uint8] = np.empty((len(self.hashes), block_bytes), np.uint8)
        self._num_bytes = self._rows.nbytes
        self._free = free
        self._changed = threading.Condition()
        self._num_there, self._num_due = 0, len(self.hashes)
        self._cut: Callable[[], None] = lambda: None
        self._has_ended = self._is_closed = False

    @property
    def num_bytes(self) -> int:
        """Bytes of reserved memory."""
        return self._num_bytes

    @property
    def is_closed(self) -> bool:
        """Whether it was cancelled."""
        return self._is_closed

    def begin(self, num_blocks: int, cut: Callable[[], None]) -> None:
        """Register the connection that receives the blocks, before the first block.

        Args:
            num_blocks: Number of blocks to receive, at most as many as there is memory for.
            cut: Ends the connection; must not wait.
        """
        with self._changed:
            self._cut, self._num_due = cut, num_blocks
            self._changed.notify_all()
            is_closed = self._is_closed
        if is_closed:
            cut()

    def row(self, index: int) -> NDArray[np.uint8]:
        """Return the buffer of a block, ``[block_bytes]``.

        Raises:
            TransferError: ``cancelled``: the push was closed.
        """
        with self._changed:
            if self._is_closed:
                raise TransferError("The blocks are not wanted any more.", cause=TransferCause.CANCELLED)
            row: NDArray[np.uint8] = self._rows[index]
            return row

    def came(self) -> None:
        """Called when the next block was received and verified."""
        with self._changed:
            self._num_there += 1
            self._changed.notify_all()

    def end(self, error: TransferError | None = None) -> None:
        """Called when receiving has ended; may be called twice."""
        with self._changed:
            if self._has_ended:
                return
            self._has_ended, self.error, self._cut = True, error, lambda: None
            self._changed.notify_all()
            is_over = self._is_closed
        if is_over:
            self._give_back()

    def wait(self, num_blocks: int, *, until_s: float) -> NDArray[np.uint8]:
        """Return the received blocks, ``[n, block_bytes]``, once there are more than ``num_blocks``, or no more will come.

        Args:
            num_blocks: Number of blocks that the caller already has.
            until_s: Deadline, in the time of ``time.monotonic``.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: not self._is_due(num_blocks),
                max(0.0, until_s - time.monotonic()),
            )
            return self._rows[: 0 if self._is_closed else self._num_there]

    def close(self) -> None:
        """Cancel; may be called twice."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
            is_over, is_complete, cut = self._has_ended, self._num_there >= self._num_due, self._cut
        if is_over:
            self._give_back()
        elif not is_complete:  # else only the final message is missing
            cut()

    def _is_due(self, num_blocks: int) -> bool:
        """Return whether more than so many blocks may still arrive and have not yet."""
        is_open = not self._has_ended and not self._is_closed
        return is_open and self._num_there <= num_blocks < self._num_due

    def _give_back(self) -> None:
        self._rows = np.empty((0, 0), np.uint8)
        self._free(self._num_bytes)


class Pushes:
    """All pushes to one engine, and their memory. From any thread.

    Args:
        max_bytes: Maximum bytes of reserved memory.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._by_name: dict[str, Push] = {}
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes of reserved memory."""
        return self._num_bytes

    def open(self, hashes: Sequence[bytes], *, block_bytes: int) -> Push | None:
        """Reserve memory for as many leading blocks as possible; None if for none."""
        with self._lock:
            num_blocks = min(len(hashes), (self._max_bytes - self._num_bytes) // block_bytes)
            if num_blocks < 1:
                return None
            self._num_bytes += num_blocks * block_bytes
        return Push(hashes[:num_blocks], block_bytes, free=self._give_back)

    def name(self, hold_id: str, push: Push) -> None:
        """Register a push under the id of the hold at the other engine."""
        with self._lock:
            self._by_name[hold_id] = push

    def take(self, hold_id: str) -> Push | None:
        """Remove and return the push for a hold id; None if there is none."""
        with self._lock:
            return self._by_name.pop(hold_id, None)

    def close(self) -> None:
        """Close all pushes that were not taken; may be called twice."""
        with self._lock:
            left, self._by_name = list(self._by_name.values()), {}
        for push in left:
            push.close()

    def _give_back(self, num_bytes: int) -> None:
        with self._lock:
            self._num_bytes -= num_bytes
