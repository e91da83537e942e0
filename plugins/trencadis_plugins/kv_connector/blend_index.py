"""Which chunks are kept, and where they stand in a prompt: anywhere, in any order. One table for each tenant.

A chunk is found by the hash of its first tokens; then its tokens are compared, and it counts as far as they agree. A table knows
nothing of another tenant's chunks, so that nobody learns what others have asked.
"""

from __future__ import annotations

import hashlib
from typing import TypeAlias

import attrs
import numpy as np

from trencadis.kv.bounded import BoundedDict
from trencadis.records import Int32Array, Int64Array, Request
from trencadis_plugins.kv_connector.blend_windows import WindowHash

__all__ = ["ChunkIndex", "ChunkMatch", "Tenant", "chunk_key", "tenant_of"]

Tenant: TypeAlias = tuple[str, str]
"""Cache salt and adapter: who differs in either shares nothing."""

_MAX_ALIKE = 8
"""Chunks that begin alike and are compared: those of a template may be thousands."""
_FILTER_BITS = 1 << 16


def tenant_of(request: Request) -> Tenant:
    """Return whose table a request uses. Pure."""
    return request.cache_salt, request.adapter


def chunk_key(tenant: Tenant, token_ids: Int32Array) -> bytes:
    """Return the identity of a chunk, 32 bytes. Pure."""
    digest = hashlib.blake2b(digest_size=32, person=b"kvb1-chunk")
    for text in tenant:
        digest.update(len(text.encode()).to_bytes(8, "little") + text.encode())
    digest.update(token_ids.astype("<i4").tobytes())
    return digest.digest()


@attrs.frozen(eq=False)
class _Chunk:
    key: bytes
    token_ids: Int32Array
    first: int


@attrs.frozen(kw_only=True)
class ChunkMatch:
    """Tokens of a chunk in a prompt.

    Attributes:
        key: Of the chunk.
        chunk_tokens: All that the chunk has.
        skip: Tokens of the chunk in front of those meant.
        position: Of the first one meant, in the prompt.
        num_tokens: How many are meant.
    """

    key: bytes
    chunk_tokens: int
    skip: int
    position: int
    num_tokens: int


class ChunkIndex:
    """The tables. One thread.

    Args:
        windows: Hashes of as many tokens as the shortest chunk has.
        max_chunks: Of all tenants; the one that was kept or found longest ago is forgotten first.
    """

    def __init__(self, windows: WindowHash, *, max_chunks: int) -> None:
        self._windows = windows
        self._max_chunks = max_chunks
        self._tables: dict[Tenant, _Table] = {}
        self._chunks: BoundedDict[tuple[Tenant, bytes], None] = BoundedDict(max_chunks + 1)

    def __len__(self) -> int:
        return len(self._chunks)

    def has(self, tenant: Tenant, key: bytes) -> bool:
        """Return whether a chunk is kept."""
        return (tenant, key) in self._chunks

    def add(self, tenant: Tenant, key: bytes, token_ids: Int32Array) -> None:
        """Note a chunk of at least ``windows.window`` tokens."""
        if self.has(tenant, key):
            return
        first = int(self._windows.of(token_ids[: self._windows.window])[0])
        self._tables.setdefault(tenant, _Table()).add(_Chunk(key, token_ids.copy(), first))
        self._chunks[tenant, key] = None
        if len(self._chunks) > self._max_chunks:
            self.forget(*next(iter(self._chunks)))

    def forget(self, tenant: Tenant, key: bytes) -> None:
        """Forget a chunk, if it is known."""
        if self._chunks.pop((tenant, key), self) is self:
            return
        table = self._tables[tenant]
        table.remove(key)
        if not table.chunks:
            del self._tables[tenant]

    def find(self, tenant: Tenant, token_ids: Int32Array, *, first: int = 0) -> list[ChunkMatch]:
        """Return chunks of a tenant in a prompt, from left to right, none over another, the longest where several begin.

        Args:
            tenant: Whose.
            token_ids: The prompt, ``[T]``.
            first: Tokens in front that are not wanted: a chunk that begins in them counts from there on.
        """
        table = self._tables.get(tenant)
        if table is None:
            return []
        hashes = self._windows.of(token_ids)
        matches: list[ChunkMatch] = []
        end = 0
        for place in table.candidates(hashes).tolist():
            if place < end:
                continue
            chunk, length = table.longest(int(hashes[place]), token_ids[place:], least=self._windows.window)
            if chunk is None:
                continue
            end = place + length
            self._chunks.move_to_end((tenant, chunk.key))
            skip = max(0, first - place)
            if length > skip:
                matches.append(
                    ChunkMatch(
                        key=chunk.key,
                        chunk_tokens=len(chunk.token_ids),
                        skip=skip,
                        position=place + skip,
                        num_tokens=length - skip,
                    )
                )
        return matches


class _Table:
    """The chunks of one tenant."""

    def __init__(self) -> None:
        self.chunks: dict[bytes, _Chunk] = {}
        self._by_first: dict[int, list[_Chunk]] = {}
        self._filter = np.zeros(_FILTER_BITS, np.bool_)

    def add(self, chunk: _Chunk) -> None:
        self.chunks[chunk.key] = chunk
        self._by_first.setdefault(chunk.first, []).append(chunk)
        self._filter[chunk.first % _FILTER_BITS] = True

    def remove(self, key: bytes) -> None:
        chunk = self.chunks.pop(key)
        alike = self._by_first[chunk.first]
        alike.remove(chunk)
        if not alike:
            del self._by_first[chunk.first]  # the filter keeps its bit: it may say yes in vain

    def candidates(self, hashes: Int64Array) -> Int64Array:
        """Return where a chunk may begin."""
        return np.flatnonzero(self._filter[hashes % _FILTER_BITS])

    def longest(self, first: int, token_ids: Int32Array, *, least: int) -> tuple[_Chunk | None, int]:
        """Return the chunk that agrees with a text for longest, and for how many tokens; None for none of ``least``."""
        best, most = None, least - 1
        for chunk in self._by_first.get(first, [])[-_MAX_ALIKE:]:
            length = min(len(chunk.token_ids), len(token_ids))
            differs = np.flatnonzero(chunk.token_ids[:length] != token_ids[:length])
            agrees = int(differs[0]) if differs.size else length
            if agrees > most:
                best, most = chunk, agrees
        return best, most if best is not None else 0
