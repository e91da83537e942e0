"""Shapes of passes, written from the definitions and one block at a time: what fakes and drivers hold an engine's against."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from trencadis.interfaces import BackendCapabilities
from trencadis.records import Pass, Phase, Shape, UnifiedShape

__all__ = ["decode_shape", "prefill_shape", "unified_shape_of", "why_too_small"]


def prefill_shape(starts: Sequence[int], query_lens: Sequence[int], *, block_size: int, merged: bool) -> Shape:
    """Return the shape of a prefill pass. Pure.

    Args:
        starts: Tokens computed before, by sequence.
        query_lens: New tokens, by sequence.
        block_size: Tokens per block.
        merged: Prompts follow each other in one row.
    """
    contexts = [-(-start // block_size) for start in starts]
    if merged:
        return Shape(1, sum(query_lens), sum(contexts))
    return Shape(len(contexts), max(query_lens), max(contexts))


def decode_shape(
    starts: Sequence[int],
    query_lens: Sequence[int],
    tables: Sequence[Sequence[int]],
    *,
    block_size: int,
    contiguous: bool,
) -> Shape:
    """Return the shape of a decode pass; ``tables`` are the sequences' blocks. Pure."""
    held = [
        list(blocks[: -(-(start + length) // block_size)])
        for start, length, blocks in zip(starts, query_lens, tables, strict=True)
    ]
    num_blocks = 1 + max(map(max, held)) if contiguous else sum(map(len, held))
    return Shape(len(held), max(query_lens), num_blocks, Phase.DECODE)


def unified_shape_of(
    starts: Sequence[int], query_lens: Sequence[int], tables: Sequence[Sequence[int]], *, block_size: int
) -> UnifiedShape:
    """Return the shape of a unified pass; ``tables`` are the sequences' blocks. Pure."""
    readers: Counter[int] = Counter()
    for start, length, blocks in zip(starts, query_lens, tables, strict=True):
        num_cached = start if length > 1 else start + 1
        for block in blocks[: -(-num_cached // block_size)]:
            readers[block] += length
    return UnifiedShape(
        query_len=sum(query_lens),
        num_blocks=sum(number > 1 for number in readers.values()),
        num_unique_blocks=1 + max((block for block, number in readers.items() if number == 1), default=-1),
        is_causal=max(query_lens) > 1,
    )


def why_too_small(
    one: Pass, tables: Sequence[Sequence[int]], capabilities: BackendCapabilities, *, block_size: int
) -> str:
    """Return, in words, why the bucket of a pass does not hold it, or an empty string. Pure.

    Args:
        one: The pass.
        tables: Blocks of its sequences.
        capabilities: Capabilities of the backend that is to run it.
        block_size: Tokens per block.
    """
    starts, lengths = one.starts.tolist(), one.query_lens.tolist()
    shape: Shape
    if capabilities.layout == "unified":
        shape = unified_shape_of(starts, lengths, tables, block_size=block_size)
    elif one.bucket.phase is Phase.PREFILL:
        most, merged = capabilities.max_prefill_batch_size, capabilities.merges_prefills
        if most and len(starts) > most:
            return f"{len(starts)} prompts in a pass of at most {most}"
        shape = prefill_shape(starts, lengths, block_size=block_size, merged=merged)
    else:
        contiguous = capabilities.contiguous
        shape = decode_shape(starts, lengths, tables, block_size=block_size, contiguous=contiguous)
    return "" if one.bucket.covers(shape) else f"{one.bucket} does not hold {shape}"
