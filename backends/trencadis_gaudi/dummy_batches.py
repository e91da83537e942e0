"""What a batch that fills a bucket looks like in the vendor's warm-up. Pure.

Our own warm-up runs passes of padding alone, which have the same shapes; these are for comparison with the vendor's and for
measurements of a full batch.

Source: vllm-gaudi, v1/worker/hpu_model_runner.py, _prepare_dummy_scenario; unified: the same file of v0.11.2.
"""

from __future__ import annotations

import attrs

from trencadis.records import Bucket, UnifiedShape

__all__ = ["DummySequence", "dummy_decode", "dummy_merged_prefill", "dummy_prefill", "dummy_unified"]


@attrs.frozen
class DummySequence:
    """One sequence of a dummy batch.

    Attributes:
        context_len: Tokens computed before.
        query_len: New tokens.
        blocks: Block ids of its tokens computed before; of a decode also of the new one.
    """

    context_len: int
    query_len: int
    blocks: tuple[int, ...]


def dummy_prefill(bucket: Bucket, *, block_size: int, max_model_len: int) -> tuple[DummySequence, ...]:
    """Return the sequences of a prefill bucket: as much context as the model's length leaves, in block 0.

    Args:
        bucket: Of prefills.
        block_size: Tokens per block.
        max_model_len: Tokens of a sequence.
    """
    return (_prompt(bucket.query_len, bucket.num_blocks, block_size, max_model_len),) * bucket.batch_size


def dummy_merged_prefill(
    bucket: Bucket, *, block_size: int, max_model_len: int, num_sequences: int
) -> tuple[DummySequence, ...]:
    """Return the sequences of a merged prefill bucket: its queries and blocks, dealt out evenly, the first ones having more.

    Args:
        bucket: Counts all sequences together.
        block_size: Tokens per block.
        max_model_len: Tokens of a sequence.
        num_sequences: Most sequences at once; one without a query is left out.
    """
    queries = _dealt(bucket.query_len, num_sequences)
    blocks = _dealt(bucket.num_blocks, num_sequences)
    pairs = zip(queries, blocks, strict=True)
    return tuple(_prompt(query_len, held, block_size, max_model_len) for query_len, held in pairs if query_len)


def dummy_decode(
    bucket: Bucket,
    *,
    block_size: int,
    max_model_len: int,
    num_blocks: int,
    contiguous: bool,
    lookahead: int = 1,
    window: int = 0,
) -> tuple[DummySequence, ...]:
    """Return the sequences of a decode bucket.

    Gathered blocks are dealt out evenly. Where the cache is read by range, one block id makes a pass as large as its bucket: every
    sequence is one block long, or as long as the window, in the last block of the range.

    Args:
        bucket: Of decodes.
        block_size: Tokens per block.
        max_model_len: Tokens of a sequence.
        num_blocks: Of the cache, without the padding block.
        contiguous: The cache is read by range.
        lookahead: New tokens of a sequence, drafts included.
        window: Of the model's layers; 0 for none.
    """
    if contiguous:
        held = window // block_size + 1 if window else 1
        counts, block = [held] * bucket.batch_size, min(bucket.num_blocks, num_blocks) - 1
    else:
        counts, block = _dealt(bucket.num_blocks, bucket.batch_size), 0
    return tuple(
        DummySequence(max(0, min(count * block_size, max_model_len) - lookahead), lookahead, (block,) * count)
        for count in counts
    )


def dummy_unified(
    shape: UnifiedShape, *, block_size: int, max_model_len: int, num_sequences: int
) -> tuple[DummySequence, ...]:
    """Return the sequences of a unified bucket.

    With prompts: one decode in the last unique block, and prompts that share the other queries and hold the shared blocks. Without:
    decodes alone, each shared block in two of them; one without any has a unique block.

    Args:
        shape: Of the bucket.
        block_size: Tokens per block.
        max_model_len: Tokens of a sequence.
        num_sequences: Most sequences at once.
    """
    last = shape.num_unique_blocks - 1
    shared = [shape.num_blocks + 1 if block == last else block for block in range(shape.num_blocks)]
    if not shape.is_causal:
        return _unified_decodes(shape, shared, block_size)
    sequences = [DummySequence(block_size - 1, 1, (last,))] if shape.num_unique_blocks else []
    most = max(0, (max_model_len - shape.query_len) // block_size)
    for query_len in _dealt(shape.query_len - len(sequences), max(1, num_sequences - 1)):
        blocks, shared = shared[:most], shared[most:]
        if query_len:
            sequences.append(DummySequence(len(blocks) * block_size, query_len, tuple(blocks)))
    return tuple(sequences)


def _unified_decodes(shape: UnifiedShape, shared: list[int], block_size: int) -> tuple[DummySequence, ...]:
    held: list[list[int]] = [[] for _ in range(shape.query_len)]
    for index, block in enumerate(shared):
        for step in range(min(2, shape.query_len)):
            held[(index + step) % shape.query_len].append(block)
    unique = (block for block in range(shape.num_unique_blocks - 1, -1, -1) if block not in shared)
    if shape.num_unique_blocks:
        held[0].append(next(unique))
    # A decode reads at least the block it writes to.
    whole = [blocks or [next(unique, 0)] for blocks in held]
    return tuple(DummySequence(len(blocks) * block_size - 1, 1, tuple(blocks)) for blocks in whole)


def _prompt(query_len: int, num_context: int, block_size: int, max_model_len: int) -> DummySequence:
    held = num_context
    if query_len + num_context * block_size > max_model_len:
        held = max(0, (max_model_len - query_len) // block_size)
    return DummySequence(held * block_size, query_len, (0,) * held)


def _dealt(total: int, num_parts: int) -> list[int]:
    least, more = divmod(total, num_parts)
    return [least + (part < more) for part in range(num_parts)]
