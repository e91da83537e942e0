"""Where a prompt is cut into chunks, and which blocks of a sequence make up the chunks that are to be kept."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import attrs
import numpy as np

from trencadis.kv.bounded import BoundedDict
from trencadis.records import Int32Array, Request
from trencadis_plugins.kv_connector.blend_index import Tenant, chunk_key, tenant_of
from trencadis_plugins.kv_connector.blend_messages import KeepOrder

__all__ = ["WantedChunk", "WantedChunks", "cut"]

_MAX_WANTED = 4096
"""Of prompts that were aborted nobody says so: their chunks are forgotten when others come."""


def cut(
    token_ids: Int32Array, *, chunk_tokens: int, min_tokens: int, separator: Sequence[int] = ()
) -> list[tuple[int, int]]:
    """Return where chunks begin and end, from left to right. Pure.

    Args:
        token_ids: The prompt, ``[T]``.
        chunk_tokens: The longest.
        min_tokens: The shortest; what is shorter is left out.
        separator: Tokens at which the prompt is cut first; they stay at the end of what they end.
    """
    ends = [*_ends_of(token_ids, separator), len(token_ids)]
    spans = []
    for start, end in zip([0, *ends], ends, strict=False):
        spans += [(first, min(first + chunk_tokens, end)) for first in range(start, end, chunk_tokens)]
    return [(first, last) for first, last in spans if last - first >= min_tokens]


def _ends_of(token_ids: Int32Array, separator: Sequence[int]) -> list[int]:
    count = len(token_ids) - len(separator) + 1
    if not separator or count <= 0:
        return []
    found = np.ones(count, np.bool_)
    for offset, token in enumerate(separator):
        found &= token_ids[offset : offset + count] == token
    return [place + len(separator) for place in np.flatnonzero(found).tolist()]


@attrs.frozen(kw_only=True, eq=False)
class WantedChunk:
    """A chunk whose blocks are awaited.

    Attributes:
        number: Names it towards the worker side.
        tenant: Whose.
        key: Of the chunk.
        token_ids: Its tokens.
        position: Of the first one in the prompt.
        hashes: Of the blocks it lies in.
    """

    number: int
    tenant: Tenant
    key: bytes
    token_ids: Int32Array
    position: int
    hashes: tuple[bytes, ...]


class WantedChunks:
    """Chunks of prompts that are being computed, by the blocks they lie in. One thread.

    Args:
        block_size: Tokens per block.
        chunk_tokens: As of :func:`cut`.
        min_tokens: As of :func:`cut`.
        separator: As of :func:`cut`.
    """

    def __init__(self, *, block_size: int, chunk_tokens: int, min_tokens: int, separator: Sequence[int] = ()) -> None:
        self._block_size = block_size
        self._chunk_tokens = chunk_tokens
        self._min_tokens = min_tokens
        self._separator = tuple(separator)
        self._numbers = itertools.count()
        self._wanted: BoundedDict[tuple[Tenant, bytes], WantedChunk] = BoundedDict(_MAX_WANTED + 1)
        self._by_number: dict[int, WantedChunk] = {}
        self._of_block: dict[bytes, list[WantedChunk]] = {}

    def __len__(self) -> int:
        return len(self._wanted)

    def want(
        self,
        request: Request,
        token_ids: Int32Array,
        block_hashes: Sequence[bytes],
        *,
        is_kept: Callable[[Tenant, bytes], bool],
    ) -> None:
        """Note the chunks of a prompt that lie in its full blocks.

        Args:
            request: Whose.
            token_ids: Its prompt.
            block_hashes: Of its full blocks.
            is_kept: Whether a chunk is there already.
        """
        tenant, size = tenant_of(request), self._block_size
        spans = cut(
            token_ids[: len(block_hashes) * size],
            chunk_tokens=self._chunk_tokens,
            min_tokens=self._min_tokens,
            separator=self._separator,
        )
        for first, last in spans:
            chunk_ids = token_ids[first:last]
            key = chunk_key(tenant, chunk_ids)
            if not is_kept(tenant, key):
                hashes = tuple(block_hashes[first // size : -(-last // size)])
                self._add(tenant, key, chunk_ids, position=first, hashes=hashes)

    def computed(self, blocks: Sequence[int], block_hashes: Sequence[bytes]) -> list[KeepOrder]:
        """Return what of computed blocks is to be kept."""
        orders: dict[int, KeepOrder] = {}
        for block, block_hash in zip(blocks, block_hashes, strict=True):
            for chunk in self._of_block.get(block_hash, ()):
                order = orders.get(chunk.number)
                if order is None:
                    order = orders[chunk.number] = KeepOrder(
                        chunk.number,
                        chunk.key,
                        len(chunk.token_ids),
                        chunk.position,
                        len(chunk.hashes),
                        [],
                        [],
                    )
                order.places.append(chunk.hashes.index(block_hash))
                order.blocks.append(block)
        return list(orders.values())

    def drop(self, chunk: WantedChunk) -> None:
        """Want a chunk no more."""
        del self._wanted[chunk.tenant, chunk.key], self._by_number[chunk.number]
        for block_hash in chunk.hashes:
            self._of_block[block_hash].remove(chunk)
            if not self._of_block[block_hash]:
                del self._of_block[block_hash]

    def take(self, number: int) -> WantedChunk | None:
        """Return a chunk by its number, and want it no more."""
        chunk = self._by_number.get(number)
        if chunk is not None:
            self.drop(chunk)
        return chunk

    def _add(
        self, tenant: Tenant, key: bytes, token_ids: Int32Array, *, position: int, hashes: tuple[bytes, ...]
    ) -> None:
        known = self._wanted.get((tenant, key))
        if known is not None and known.hashes == hashes:
            return
        if known is not None:
            self.drop(known)  # whoever was to compute it may be gone
        chunk = WantedChunk(
            number=next(self._numbers),
            tenant=tenant,
            key=key,
            token_ids=token_ids.copy(),
            position=position,
            hashes=hashes,
        )
        self._wanted[tenant, key] = self._by_number[chunk.number] = chunk
        for block_hash in hashes:
            self._of_block.setdefault(block_hash, []).append(chunk)
        if len(self._wanted) > _MAX_WANTED:
            self.drop(next(iter(self._wanted.values())))
