"""Index of saved chunks, to find them in a prompt at any position. One table per tenant.

A chunk is found by the hash of its first tokens; its tokens are then compared, and the beginning that matches is used.
Each tenant has its own table, so no tenant learns what others have asked.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from typing import TypeAlias

import attrs
import numpy as np

from trencadis.records import Int32Array, Int64Array, Request
from trencadis_kv.connectors.blend.messages import ChunkPlace
from trencadis_kv.connectors.blend.prompt import PIECE_TOKENS, FoundChunks, WindowHash
from trencadis_kv.store.bounded import BoundedDict

__all__ = ["ChunkIndex", "Tenant", "chunk_key", "tenant_of"]

Tenant: TypeAlias = str
"""Cache salt; two requests share chunks only if theirs are equal."""

_MAX_ALIKE = 8
"""Most chunks with the same beginning that are compared; a template may have thousands."""
_FILTER_BITS = 1 << 16
_PLACE_WORK = 3
"""Work per position at which a chunk may begin, in units of one token's work."""
_COMPARED_WORK = 256
"""Work per comparison besides its tokens, in units of one token's work."""


def tenant_of(request: Request) -> Tenant:
    """Return the tenant whose table a request uses. Pure."""
    return request.cache_salt


def chunk_key(tenant: Tenant, token_ids: Int32Array) -> bytes:
    """Return the identity of a chunk, 32 bytes. Pure."""
    digest = hashlib.blake2b(digest_size=32, person=b"kvb1-chunk")
    digest.update(len(tenant.encode()).to_bytes(8, "little") + tenant.encode())
    digest.update(token_ids.astype("<i4").tobytes())
    return digest.digest()


@attrs.frozen(eq=False)
class _Chunk:
    key: bytes
    token_ids: Int32Array
    first: int


class ChunkIndex:
    """The tables of all tenants. One thread.

    Args:
        windows: Window hash; its window is the minimum length of a chunk.
        max_chunks: Maximum number of chunks of all tenants; the least recently saved or found one is removed first.
    """

    def __init__(self, windows: WindowHash, *, max_chunks: int) -> None:
        self._windows = windows
        self._max_chunks = max_chunks
        self._tables: dict[Tenant, _Table] = {}
        self._chunks: BoundedDict[tuple[Tenant, bytes], None] = BoundedDict(max_chunks + 1)

    def __len__(self) -> int:
        return len(self._chunks)

    def has(self, tenant: Tenant, key: bytes) -> bool:
        """Return whether a chunk is saved."""
        return (tenant, key) in self._chunks

    def add(self, tenant: Tenant, key: bytes, token_ids: Int32Array) -> None:
        """Add a chunk of at least ``windows.window`` tokens."""
        if self.has(tenant, key):
            return
        first = int(self._windows.of(token_ids[: self._windows.window])[0])
        self._tables.setdefault(tenant, _Table()).add(_Chunk(key, token_ids.copy(), first))
        self._chunks[tenant, key] = None
        if len(self._chunks) > self._max_chunks:
            self.forget(*next(iter(self._chunks)))

    def forget(self, tenant: Tenant, key: bytes) -> None:
        """Remove a chunk, if it is there."""
        if self._chunks.pop((tenant, key), self) is self:
            return
        table = self._tables[tenant]
        table.remove(key)
        if not table.chunks:
            del self._tables[tenant]

    def search(self, tenant: Tenant, token_ids: Int32Array, found: FoundChunks) -> Iterator[int]:
        """Find a tenant's chunks in a prompt, from left to right, without overlaps; the longest if several match at a place.

        Yields the work of each part of the prompt, in tokens hashed and compared.

        Args:
            tenant: Tenant whose table is searched.
            token_ids: Prompt, int32 ``[T]``.
            found: Receives the chunks.
        """
        window, end = self._windows.window, 0
        step = max(PIECE_TOKENS, window)
        for first in range(0, len(token_ids) - window + 1, step):
            table = self._tables.get(tenant)
            if table is None:
                return
            if end >= first + step:
                continue
            hashes = self._windows.of(token_ids[first : first + step + window - 1])
            begins, num_tried = table.begins(hashes)
            yield len(hashes) + window + num_tried * _PLACE_WORK
            for offset, window_hash in begins:
                if first + offset < end:
                    continue
                place, work = self._at(tenant, table, window_hash, token_ids, first + offset)
                if place is not None:
                    found.add(place)
                    end = place.position + place.num_tokens
                yield work

    def _at(
        self, tenant: Tenant, table: _Table, window_hash: int, token_ids: Int32Array, position: int
    ) -> tuple[ChunkPlace | None, int]:
        """Return the chunk that begins at a position, or None, and the number of tokens compared."""
        chunk, length, work = table.longest(window_hash, token_ids[position:], least=self._windows.window)
        if chunk is None:
            return None, work
        self._chunks.move_to_end((tenant, chunk.key))
        return ChunkPlace(chunk.key, len(chunk.token_ids), 0, position, length), work


class _Table:
    """The chunks of one tenant."""

    def __init__(self) -> None:
        self.chunks: dict[bytes, _Chunk] = {}
        self._by_first: dict[int, dict[bytes, _Chunk]] = {}
        self._filter = np.zeros(_FILTER_BITS, np.bool_)

    def add(self, chunk: _Chunk) -> None:
        self.chunks[chunk.key] = chunk
        self._by_first.setdefault(chunk.first, {})[chunk.key] = chunk
        self._filter[chunk.first % _FILTER_BITS] = True

    def remove(self, key: bytes) -> None:
        chunk = self.chunks.pop(key)
        alike = self._by_first[chunk.first]
        del alike[key]
        if not alike:
            del self._by_first[chunk.first]  # the filter keeps its bit: false positives are allowed

    def begins(self, hashes: Int64Array) -> tuple[list[tuple[int, int]], int]:
        """Return positions where chunks may begin, with their hashes, and the number of positions tried."""
        places = np.flatnonzero(self._filter[hashes % _FILTER_BITS])
        tried = zip(places.tolist(), hashes[places].tolist(), strict=True)
        return [(place, found) for place, found in tried if found in self._by_first], len(places)

    def longest(self, first: int, token_ids: Int32Array, *, least: int) -> tuple[_Chunk | None, int, int]:
        """Return the chunk with the longest match (None if below ``least`` tokens), the match's length, and the work in tokens."""
        best, most, work = None, least - 1, 0
        newest = itertools.islice(reversed(self._by_first.get(first, {}).values()), _MAX_ALIKE)
        for chunk in reversed(list(newest)):
            length = min(len(chunk.token_ids), len(token_ids))
            differs = np.flatnonzero(chunk.token_ids[:length] != token_ids[:length])
            agrees = int(differs[0]) if differs.size else length
            work += length + _COMPARED_WORK
            if agrees > most:
                best, most = chunk, agrees
        return best, most if best is not None else 0, work
