"""What a unified pass reads of the cache: which blocks many of its tokens see, and which only one does. NumPy on the host, pure.

    context of a sequence    prompts: the tokens computed before; decodes: those and the current one, which is read back
    shared block             read for more than one token of the pass: gathered, every token against every shared block
    unique block             read for one token: the cache from its first block on, each block against its own token

So the context of a prompt chunk of several tokens counts as shared. Shapes: n sequences, M shared and U unique blocks.
Source: vllm-gaudi v0.11.2, extension/unified_batch.py.
"""

from __future__ import annotations

import attrs
import numpy as np

from trencadis.records import BoolArray, Int32Array, Int64Array, Pass, UnifiedShape
from trencadis_gaudi.passes.block_lists import owned_blocks

__all__ = ["UnifiedBatch", "cached_tokens", "unified_batch"]


@attrs.frozen(kw_only=True)
class UnifiedBatch:
    """Blocks of a pass by kind.

    Attributes:
        cached: Tokens that each sequence reads from the cache, int32 ``[n]``.
        is_causal: Sequences that attend to their new tokens directly, bool ``[n]``.
        shared: Distinct shared blocks, ascending, int64 ``[M]``.
        shared_columns: Index of each within each sequence, -1 where it is none of its blocks, int64 ``[n, M]``.
        unique: Unique blocks, int64 ``[num_unique_refs]``.
        unique_groups: Sequence of each.
        unique_columns: Index of each within its sequence.
        shape: What the pass needs.
    """

    cached: Int32Array
    is_causal: BoolArray
    shared: Int64Array
    shared_columns: Int64Array
    unique: Int64Array
    unique_groups: Int64Array
    unique_columns: Int64Array
    shape: UnifiedShape


def cached_tokens(starts: Int32Array, query_lens: Int32Array, prompt_lens: Int32Array) -> Int32Array:
    """Return how many tokens each sequence reads from the cache, as the source counts: a prompt's new ones are not among them.

    Args:
        starts: Tokens computed before, int32 ``[n]``.
        query_lens: New tokens of each.
        prompt_lens: Length of each prompt.
    """
    is_prompt = starts + query_lens <= prompt_lens
    return np.where(is_prompt, starts, starts + query_lens).astype(np.int32)


def unified_batch(one: Pass, tables: Int32Array, *, block_size: int, cached: Int32Array | None = None) -> UnifiedBatch:
    """Return the blocks of a pass by kind.

    Args:
        one: The pass; its bucket is not read.
        tables: Block tables of all rows, int32 ``[num_rows, num_columns]``.
        block_size: Tokens per block.
        cached: Tokens that each sequence reads from the cache, its computed tokens or those and its only new one; None takes a
            sequence with several new tokens for a prompt.
    """
    if cached is None:
        cached = np.where(one.query_lens > 1, one.starts, one.starts + one.query_lens).astype(np.int32)
    owned = owned_blocks(tables, one.rows, np.zeros_like(cached), -(-cached // block_size))
    distinct, index = np.unique(owned.blocks, return_inverse=True)
    readers = np.bincount(index, weights=one.query_lens[owned.groups], minlength=len(distinct))
    is_shared = readers > 1
    columns = np.full((len(one.rows), len(distinct)), -1, np.int64)
    columns[owned.groups, index] = owned.columns
    alone = ~is_shared[index]
    unique = owned.blocks[alone]
    is_causal = cached == one.starts
    return UnifiedBatch(
        cached=cached,
        is_causal=is_causal,
        shared=distinct[is_shared],
        shared_columns=columns[:, is_shared],
        unique=unique,
        unique_groups=owned.groups[alone],
        unique_columns=owned.columns[alone],
        shape=UnifiedShape(
            query_len=int(one.query_lens.sum()),
            num_blocks=int(is_shared.sum()),
            num_unique_blocks=int(unique.max(initial=-1)) + 1,
            is_causal=bool(is_causal.any()),
        ),
    )
