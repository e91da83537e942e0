"""What a backend offers that can put the KV of chunks together that were computed apart: for the connector ``blend``.

The KV of a chunk of text depends on its position, through the rotary embedding of its keys, and on all text before it. A blender
takes the first out of what is kept, puts it back for the new position, and mends the second where it matters most, by computing
some tokens anew. What it gives is near to what computing all would give.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING

import attrs

from trencadis.records import Int32Array

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["BlendChunk", "BlendOrder", "KVBlender"]


@attrs.frozen(kw_only=True, eq=False)
class BlendChunk:
    """A chunk of the prompt whose KV is at hand.

    Attributes:
        position: Position of its first token in the prompt.
        tokens: Tokens that :meth:`KVBlender.pack` returned, ``[n, token_bytes]``.
    """

    position: int
    tokens: NDArray[np.uint8]


@attrs.frozen(kw_only=True, eq=False)
class BlendOrder:
    """Blocks of one sequence to be filled.

    Attributes:
        token_ids: The prompt up to the last token to be filled, int32 ``[T]``.
        num_exact: Leading tokens whose KV is in the blocks already, and is only read; a multiple of the block size.
        blocks: Ids of all blocks, ``[T / block size]``; T is a multiple of it.
        chunks: In order of their positions, none over another, all within ``num_exact .. T``.
        ratio: Share of the tokens of chunks to compute anew, besides those that are forced, 0 .. 1; 1 computes all, exactly.
        forced: Tokens that are computed anew whatever they are like, bool ``[T]``; those in no chunk and the last one are anyway.
    """

    token_ids: Int32Array
    num_exact: int
    blocks: Int32Array
    chunks: tuple[BlendChunk, ...]
    ratio: float
    forced: NDArray[np.bool_]


class KVBlender(ABC):
    """Takes KV out of blocks without its position, and puts it together in others. ``KVPool.blender`` returns one.

    Attributes:
        token_bytes: Size of one token without its position, in bytes.
    """

    token_bytes: int

    @abstractmethod
    def pack(self, blocks: NDArray[np.uint8], *, skip: int, num_tokens: int, position: int) -> NDArray[np.uint8]:
        """Return tokens without their positions, ``[num_tokens, token_bytes]``. Pure; from any thread.

        Args:
            blocks: Content of blocks that follow each other, ``[n, block_bytes]``.
            skip: Tokens of the first block that do not belong to them.
            num_tokens: How many.
            position: Position of the first of them in its sequence.
        """

    @abstractmethod
    def blend(self, order: BlendOrder) -> Iterator[None]:
        """Fill blocks, layer by layer: each ``next`` does a part of the work, and the last one raises ``StopIteration``.

        On the backend's thread only. Nothing else uses the blocks meanwhile; what they hold before the end means nothing. Whoever
        does not want them any more drops the iterator.
        """
