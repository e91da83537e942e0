"""A chunk as an object in a store: the header of a KV block, with keys marked as not rotated, and tokens one after the other."""

from __future__ import annotations

import attrs
import numpy as np
from numpy.typing import NDArray

from trencadis.errors import TransferError
from trencadis.records import KVLayout, TransferCause
from trencadis_kv.store.format import HEADER_BYTES, pack_header, verify
from trencadis_kv.store.identity import compat_id

__all__ = ["ChunkObjects"]


class ChunkObjects:
    """Packs and unpacks the chunks of one rank. From any thread.

    Args:
        layout: Of the cache.
        identity: Of the model.
        token_bytes: Of one token in a chunk.
    """

    def __init__(self, layout: KVLayout, *, identity: str, token_bytes: int) -> None:
        self._layout = attrs.evolve(layout, rotated=False, block_size=1)  # chunks have no blocks
        self._compat = compat_id(self._layout, identity=identity)
        self._token_bytes = token_bytes

    def key(self, chunk_key: bytes) -> str:
        """Return the key of a chunk: never that of a block. Pure."""
        return f"kvb1/{self._compat.hex()}/{chunk_key.hex()}"

    def num_bytes(self, num_tokens: int) -> int:
        """Return the size of an object. Pure."""
        return HEADER_BYTES + num_tokens * self._token_bytes

    def pack(self, chunk_key: bytes, tokens: NDArray[np.uint8], *, position: int) -> list[memoryview]:
        """Return the pieces of an object. Pure.

        Args:
            chunk_key: Of the chunk.
            tokens: ``[n, token_bytes]``.
            position: Where it stood, for people.
        """
        payload = np.ascontiguousarray(tokens).data.cast("B")
        layout = attrs.evolve(self._layout, block_size=len(tokens))
        header = pack_header(layout, compat=self._compat, block_hash=chunk_key, payload=payload, first_token=position)
        return [memoryview(header), payload]

    def unpack(self, chunk_key: bytes, data: NDArray[np.uint8], *, num_tokens: int) -> NDArray[np.uint8]:
        """Return the tokens of an object, ``[num_tokens, token_bytes]``, once it is proven to be that chunk.

        Args:
            chunk_key: That was asked for.
            data: The object, all its bytes.
            num_tokens: That the chunk has.

        Raises:
            TransferError: ``corrupt`` or ``incompatible``.
        """
        if len(data) != self.num_bytes(num_tokens):
            raise TransferError(
                f"The KV object is broken: {len(data)} bytes for {num_tokens} tokens.", cause=TransferCause.CORRUPT
            )
        payload = data[HEADER_BYTES:]
        verify(bytes(data[:HEADER_BYTES]), payload.data, compat=self._compat, block_hash=chunk_key)
        return payload.reshape(num_tokens, self._token_bytes)
