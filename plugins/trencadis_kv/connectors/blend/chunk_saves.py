"""Saving chunks: blocks are copied as they are computed; a complete chunk is made position-independent and written."""

from __future__ import annotations

import attrs
import numpy as np
from numpy.typing import NDArray

from trencadis.errors import TransferError
from trencadis.interfaces import KVBlender, KVPool
from trencadis.records import KVLayout, TransferCause
from trencadis_kv.connectors.blend.messages import BlendShared, SaveChunkOrder
from trencadis_kv.store.client import StoreClient
from trencadis_kv.store.format import HEADER_BYTES, pack_header, verify
from trencadis_kv.store.identity import compat_id
from trencadis_kv.store.threads import StoreThreads

__all__ = ["ChunkObjects", "ChunkSaver"]


class ChunkObjects:
    """Packs and unpacks the chunks of one rank. From any thread.

    Args:
        layout: KV layout of the rank.
        identity: Identity of the model, part of every key.
        token_bytes: Bytes of one token in a packed chunk.
    """

    def __init__(self, layout: KVLayout, *, identity: str, token_bytes: int) -> None:
        self._layout = attrs.evolve(layout, rotated=False, block_size=1)  # chunks are not made of blocks
        self._compat = compat_id(self._layout, identity=identity)
        self._token_bytes = token_bytes

    def key(self, chunk_key: bytes) -> str:
        """Return the key of a chunk, which differs from that of any block. Pure."""
        return f"kvb1/{self._compat.hex()}/{chunk_key.hex()}"

    def num_bytes(self, num_tokens: int) -> int:
        """Return the size of an object. Pure."""
        return HEADER_BYTES + num_tokens * self._token_bytes

    def pack(self, chunk_key: bytes, tokens: NDArray[np.uint8], *, position: int) -> list[memoryview]:
        """Return the pieces of an object. Pure.

        Args:
            chunk_key: Identity of the chunk, 32 bytes.
            tokens: Packed KV, uint8 ``[n, token_bytes]``.
            position: Position of the chunk's first token in the prompt that computed it; informative only.
        """
        payload = np.ascontiguousarray(tokens).data.cast("B")
        layout = attrs.evolve(self._layout, block_size=len(tokens))
        header = pack_header(layout, compat=self._compat, block_hash=chunk_key, payload=payload, first_token=position)
        return [memoryview(header), payload]

    def unpack(self, chunk_key: bytes, data: NDArray[np.uint8], *, num_tokens: int) -> NDArray[np.uint8]:
        """Return the tokens of an object, ``[num_tokens, token_bytes]``, after verifying that it is the chunk.

        Args:
            chunk_key: Expected identity of the chunk, 32 bytes.
            data: All bytes of the object, uint8.
            num_tokens: Number of tokens in the chunk.

        Raises:
            TransferError: The object is ``corrupt`` or ``incompatible``.
        """
        if len(data) != self.num_bytes(num_tokens):
            raise TransferError(
                f"The KV object is broken: {len(data)} bytes for {num_tokens} tokens.", cause=TransferCause.CORRUPT
            )
        payload = data[HEADER_BYTES:]
        verify(bytes(data[:HEADER_BYTES]), payload.data, compat=self._compat, block_hash=chunk_key)
        return payload.reshape(num_tokens, self._token_bytes)


class _Part:
    """A partly computed chunk; once complete, a task for a thread.

    Args:
        order: First save order of the chunk.
        keeper: Saver that the chunk belongs to.
        block_bytes: Bytes of one KV block.
    """

    def __init__(self, order: SaveChunkOrder, keeper: ChunkSaver, block_bytes: int) -> None:
        self._order = order
        self._keeper = keeper
        self._is_there = np.zeros(order.num_blocks, np.bool_)
        self.number = order.number
        self.blocks: NDArray[np.uint8] = np.empty((order.num_blocks, block_bytes), np.uint8)

    @property
    def is_wanted(self) -> bool:
        """Always True: no call is long enough to be interrupted."""
        return True

    def take(self, order: SaveChunkOrder, pool: KVPool) -> bool:
        """Copy blocks; True if the chunk is complete."""
        found = np.empty((len(order.blocks), self.blocks.shape[1]), np.uint8)
        pool.read_blocks(order.blocks, found)
        self.blocks[order.places] = found
        self._is_there[order.places] = True
        return bool(self._is_there.all())

    def run(self, client: StoreClient) -> None:
        """Write the chunk to the store."""
        order, keeper, shared = self._order, self._keeper, self._keeper.shared
        try:
            skip = order.position % keeper.block_size
            tokens = keeper.blender.pack(self.blocks, skip=skip, num_tokens=order.num_tokens, position=order.position)
            pieces = keeper.objects.pack(order.key, tokens, position=order.position)
            num_kept = client.call(lambda store: store.put([keeper.objects.key(order.key)], [pieces]))
        except TransferError as error:
            shared.failed(error, "save")
            num_kept = 0
        except Exception as error:
            shared.failed(TransferError(f"{type(error).__name__}: {error}", cause=TransferCause.RAISED), "save")
            num_kept = 0
        if num_kept:
            shared.counters.moved("save", num_tokens=order.num_tokens, num_bytes=sum(piece.nbytes for piece in pieces))
        keeper.done(self, is_kept=bool(num_kept))


class ChunkSaver:
    """Saves the chunks of one rank. Methods run on the backend's thread unless stated otherwise.

    Args:
        shared: State shared by both sides of the connector.
        pool: KV blocks on the device.
        blender: Removes positions from KV.
        objects: Packs chunks.

    Attributes:
        shared: State shared by both sides of the connector.
        blender: Removes positions from KV.
        objects: Packs chunks.
        block_size: Tokens per block.
    """

    def __init__(self, shared: BlendShared, pool: KVPool, blender: KVBlender, objects: ChunkObjects) -> None:
        layout = pool.layout
        self.shared = shared
        self.blender = blender
        self.objects = objects
        self.block_size = layout.block_size
        self._block_bytes = layout.block_bytes
        self._pool = pool
        self._parts: dict[int, _Part] = {}
        self._leaving: dict[int, _Part] = {}
        self._threads: StoreThreads[_Part] = StoreThreads(
            "trencadis-blend-save", 1, make_client=shared.client, activity=shared.activity
        )

    def save(self, order: SaveChunkOrder) -> None:
        """Copy blocks of a chunk; does not wait."""
        part = self._parts.pop(order.number, None) or self._begin(order)
        if part is None:
            return
        if not part.take(order, self._pool):
            self._parts[order.number] = part  # at the end: chunks are ordered by when they last got a block
            return
        self._leaving[part.number] = part
        if not self._threads.put(part):
            self.done(part, is_kept=False)

    def done(self, part: _Part, *, is_kept: bool) -> None:
        """Report the result of a chunk. From any thread."""
        self._leaving.pop(part.number, None)
        (self.shared.kept if is_kept else self.shared.lost).append(part.number)

    def close(self, timeout_s: float) -> None:
        """Drop chunks that are not written yet, and stop the thread."""
        self._parts.clear()
        self._threads.close(timeout_s)

    def _begin(self, order: SaveChunkOrder) -> _Part | None:
        """Allocate memory for a chunk; evicts the one that got no block for longest."""
        budget = self.shared.config.staging_bytes - order.num_blocks * self._block_bytes
        while self._parts and self._num_bytes() > budget:
            self._lose(next(iter(self._parts)))
        if self._num_bytes() > budget:
            self._lose(order.number)
            return None
        return _Part(order, self, self._block_bytes)

    def _lose(self, number: int) -> None:
        self._parts.pop(number, None)
        self.shared.lost.append(number)
        self.shared.counters.dropped("staging", 1)

    def _num_bytes(self) -> int:
        return sum(part.blocks.nbytes for held in (self._parts, dict(self._leaving)) for part in held.values())
