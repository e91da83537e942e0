"""Splitting prompts into chunks, and the blocks of a sequence that make up the chunks to be saved."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import attrs
import numpy as np

from trencadis.records import Int32Array
from trencadis_kv.connectors.blend.index import Tenant, chunk_key
from trencadis_kv.connectors.blend.messages import SaveChunkOrder
from trencadis_kv.connectors.blend.prompt import PIECE_TOKENS, PromptTokens
from trencadis_kv.store.bounded import BoundedDict

__all__ = ["WantedChunk", "WantedChunks", "cut"]

_MAX_WANTED = 4096
"""Aborted prompts are not reported: their chunks are dropped when others come."""
_MAX_SHARING = 32
"""Most chunks awaited from one block: thousands of prompts may share a beginning and differ within the chunk."""
_CHUNK_WORK, _NOTED_WORK, _BLOCK_WORK = 128, 128, 16
"""Work of a chunk besides its tokens, of registering it, and of each of its blocks, in units of one token's work."""


def cut(
    tokens: PromptTokens, *, chunk_tokens: int, min_tokens: int, separator: Sequence[int] = ()
) -> Iterator[list[tuple[int, int]]]:
    """Yield the bounds of chunks, from left to right, as further pieces of the prompt are read.

    Args:
        tokens: Prompt, read incrementally.
        chunk_tokens: Maximum length of a chunk, tokens.
        min_tokens: Minimum length of a chunk, tokens; shorter pieces are left out.
        separator: Token ids at which the prompt is cut first; they stay at the end of the chunk before the cut. Empty:
            none.
    """
    start = read = 0
    while read < len(tokens):
        before, read = read, min(read + PIECE_TOKENS, len(tokens))
        ends = _ends_of(tokens.upto(read), separator, before, read)
        spans = []
        for end in [*ends, read] if read == len(tokens) else ends:
            spans += [(first, min(first + chunk_tokens, end)) for first in range(start, end, chunk_tokens)]
            start = end
        while start + chunk_tokens <= read:
            spans.append((start, start + chunk_tokens))
            start += chunk_tokens
        yield [(first, last) for first, last in spans if last - first >= min_tokens]


def _ends_of(token_ids: Int32Array, separator: Sequence[int], before: int, read: int) -> list[int]:
    """Return the ends of separators after the first ``before`` tokens, up to ``read``."""
    first = max(0, before + 1 - len(separator))
    count = read - len(separator) + 1 - first
    if not separator or count <= 0:
        return []
    found = np.ones(count, np.bool_)
    for offset, token in enumerate(separator, start=first):
        found &= token_ids[offset : offset + count] == token
    return [first + place + len(separator) for place in np.flatnonzero(found).tolist()]


@attrs.frozen(kw_only=True, eq=False)
class WantedChunk:
    """A chunk whose blocks are awaited.

    Attributes:
        number: Number of the chunk in messages to the worker side.
        tenant: Tenant of the prompt.
        key: Identity of the chunk, 32 bytes.
        token_ids: Token ids of the chunk, int32.
        position: Position of the chunk's first token in the prompt.
        hashes: Hashes of the blocks that contain the chunk.
    """

    number: int
    tenant: Tenant
    key: bytes
    token_ids: Int32Array
    position: int
    hashes: tuple[bytes, ...]


class WantedChunks:
    """Chunks to save from prompts that are being computed, indexed by block. One thread.

    Args:
        block_size: Tokens per block.
        chunk_tokens: Maximum length of a chunk, tokens; see :func:`cut`.
        min_tokens: Minimum length of a chunk, tokens; see :func:`cut`.
        separator: Token ids at which prompts are cut first; see :func:`cut`.
    """

    def __init__(self, *, block_size: int, chunk_tokens: int, min_tokens: int, separator: Sequence[int] = ()) -> None:
        self._block_size = block_size
        self._chunk_tokens = chunk_tokens
        self._min_tokens = min_tokens
        self._separator = tuple(separator)
        self._numbers = itertools.count()
        self._wanted: BoundedDict[tuple[Tenant, bytes], WantedChunk] = BoundedDict(_MAX_WANTED + 1)
        self._by_number: dict[int, WantedChunk] = {}
        self._of_block: dict[bytes, dict[int, tuple[WantedChunk, int]]] = {}

    def __len__(self) -> int:
        return len(self._wanted)

    def want(
        self,
        tenant: Tenant,
        tokens: PromptTokens,
        block_hashes: Sequence[bytes],
        *,
        is_kept: Callable[[Tenant, bytes], bool],
    ) -> Iterator[int]:
        """Register the chunks of a prompt, from left to right; yields the tokens read and hashed since the last yield.

        Args:
            tenant: Tenant of the prompt.
            tokens: Tokens of the prompt's full blocks.
            block_hashes: Hashes of these blocks.
            is_kept: Returns whether a chunk is stored already.
        """
        size, num_read = self._block_size, 0
        pieces = cut(tokens, chunk_tokens=self._chunk_tokens, min_tokens=self._min_tokens, separator=self._separator)
        for spans in pieces:
            yield (tokens.num_read - num_read) * (1 + len(self._separator))
            num_read = tokens.num_read
            for first, last in spans:
                chunk_ids = tokens.array[first:last]
                key = chunk_key(tenant, chunk_ids)
                work = last - first + _CHUNK_WORK
                if not is_kept(tenant, key):
                    hashes = tuple(block_hashes[first // size : -(-last // size)])
                    self._add(tenant, key, chunk_ids, position=first, hashes=hashes)
                    work += _NOTED_WORK + _BLOCK_WORK * len(hashes)
                yield work

    def computed(self, blocks: Sequence[int], block_hashes: Sequence[bytes]) -> list[SaveChunkOrder]:
        """Return the chunks of computed blocks that are to be saved."""
        orders: dict[int, SaveChunkOrder] = {}
        for block, block_hash in zip(blocks, block_hashes, strict=True):
            for chunk, place in self._of_block.get(block_hash, {}).values():
                order = orders.get(chunk.number)
                if order is None:
                    order = orders[chunk.number] = SaveChunkOrder(
                        chunk.number,
                        chunk.key,
                        len(chunk.token_ids),
                        chunk.position,
                        len(chunk.hashes),
                        [],
                        [],
                    )
                order.places.append(place)
                order.blocks.append(block)
        return list(orders.values())

    def drop(self, chunk: WantedChunk) -> None:
        """Remove a chunk."""
        del self._wanted[chunk.tenant, chunk.key], self._by_number[chunk.number]
        for block_hash in chunk.hashes:
            self._of_block[block_hash].pop(chunk.number, None)
            if not self._of_block[block_hash]:
                del self._of_block[block_hash]

    def take(self, number: int) -> WantedChunk | None:
        """Remove and return a chunk by its number."""
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
            self.drop(known)  # the request that was to compute it may have ended
        chunk = WantedChunk(
            number=next(self._numbers),
            tenant=tenant,
            key=key,
            token_ids=token_ids.copy(),
            position=position,
            hashes=hashes,
        )
        self._wanted[tenant, key] = self._by_number[chunk.number] = chunk
        for place, block_hash in enumerate(hashes):
            sharing = self._of_block.setdefault(block_hash, {})
            sharing[chunk.number] = chunk, place
            if len(sharing) > _MAX_SHARING:
                self.drop(next(iter(sharing.values()))[0])
        if len(self._wanted) > _MAX_WANTED:
            self.drop(next(iter(self._wanted.values())))
