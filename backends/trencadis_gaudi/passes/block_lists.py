"""Which blocks a pass reads and which slots it writes, as arrays whose sizes follow from the bucket. NumPy on the host, pure.

    tables [[5, 2], [3]]    gathered   blocks 5 2 3 P P    groups  0  0  1 -1 -1        P: the padding block
                            by range   blocks P P 2 3 P 5  groups -1 -1  0  1 -1  0     position = block id

Shapes: B sequences of the bucket, n of them real, Q queries of each, N entries of a list, S tokens per block.
Source: vllm-gaudi, v1/worker/hpu_model_runner.py, get_habana_paged_attn_buffers.
"""

from __future__ import annotations

import attrs
import numpy as np

from trencadis.records import Int32Array, Int64Array

__all__ = [
    "BlockLists",
    "OwnedBlocks",
    "gathered_lists",
    "owned_blocks",
    "query_positions",
    "ranged_lists",
    "seen_slots",
    "token_slots",
    "window_entries",
]


@attrs.frozen(kw_only=True)
class OwnedBlocks:
    """Blocks of some sequences, sequence after sequence; parallel arrays, int64 ``[num_blocks]``.

    Attributes:
        blocks: Block ids.
        groups: Index of the sequence that each belongs to.
        columns: Index of each within its sequence.
    """

    blocks: Int64Array
    groups: Int64Array
    columns: Int64Array


@attrs.frozen(kw_only=True)
class BlockLists:
    """The same, padded: arrays int64 ``[N]``.

    Attributes:
        blocks: Block ids; the padding block in padding.
        groups: Sequence of each; -1 in padding.
        columns: Index of each within its sequence; 0 in padding.
    """

    blocks: Int64Array
    groups: Int64Array
    columns: Int64Array


def owned_blocks(tables: Int32Array, rows: Int32Array, firsts: Int32Array, ends: Int32Array) -> OwnedBlocks:
    """Return the blocks of columns ``firsts`` up to ``ends`` of some rows.

    Args:
        tables: Block tables of all rows, int32 ``[num_rows, num_columns]``.
        rows: int32 ``[n]``.
        firsts: First column of each, int32 ``[n]``.
        ends: Column after the last of each, int32 ``[n]``.
    """
    counts = ends - firsts
    groups = np.repeat(np.arange(len(rows)), counts)
    columns = np.arange(len(groups)) - np.repeat(np.cumsum(counts) - counts - firsts, counts)
    return OwnedBlocks(blocks=tables[rows[groups], columns].astype(np.int64), groups=groups, columns=columns)


def gathered_lists(owned: OwnedBlocks, *, num_entries: int, padding_block: int) -> BlockLists:
    """Return lists in the order of the sequences, for blocks that are gathered by id.

    Args:
        owned: At most ``num_entries`` blocks.
        num_entries: N.
        padding_block: Stands in padding.
    """
    return _spread(owned, np.arange(len(owned.blocks)), num_entries, padding_block)


def ranged_lists(owned: OwnedBlocks, *, num_entries: int, padding_block: int) -> BlockLists:
    """Return lists whose entry ``i`` is block ``i``, for a cache that is read from its first block on without a copy.

    A block that two sequences own is here that of the later one: blocks that are read by range must not be shared.

    Args:
        owned: Blocks with ids below ``num_entries``.
        num_entries: N.
        padding_block: Stands in holes.
    """
    return _spread(owned, owned.blocks, num_entries, padding_block)


def _spread(owned: OwnedBlocks, places: Int64Array, num_entries: int, padding_block: int) -> BlockLists:
    blocks = np.full(num_entries, padding_block, np.int64)
    groups = np.full(num_entries, -1, np.int64)
    columns = np.zeros(num_entries, np.int64)
    blocks[places], groups[places], columns[places] = owned.blocks, owned.groups, owned.columns
    return BlockLists(blocks=blocks, groups=groups, columns=columns)


def query_positions(starts: Int32Array, query_lens: Int32Array, *, query_len: int) -> Int64Array:
    """Return the position of each query of the real sequences, ``[n, Q]``; the last real one stands for the padding after it."""
    steps = np.minimum(np.arange(query_len, dtype=np.int64), query_lens[:, None] - 1)
    return starts[:, None].astype(np.int64) + steps


def seen_slots(
    lists: BlockLists, positions: Int64Array, *, block_size: int, window: int = 0
) -> tuple[Int32Array, Int32Array]:
    """Return which slots of each block the queries of its sequence see: those from ``skipped`` up to ``usage``.

    Integers, where the source has the model's dtype: bfloat16 does not hold every number up to the largest block size.

    Args:
        lists: N entries.
        positions: Of the real sequences' queries, int64 ``[n, Q]``.
        block_size: S.
        window: A query sees this many tokens, itself included; 0 sees all.

    Returns:
        ``usage``: filled slots as far as a query sees them, int32 ``[N, Q]``, 0 .. S; 1 in padding, so that no softmax over a
        block is empty there. ``skipped``: slots before the window, int32 ``[N, Q]``, 0 .. S.
    """
    padding = (lists.groups < 0)[:, None]
    # The row after the last is that of padding, which index -1 finds.
    extended = np.append(positions, np.zeros((1, positions.shape[1]), np.int64), axis=0)
    reach = extended[lists.groups] + 1 - lists.columns[:, None] * block_size
    usage = np.where(padding, 1, np.clip(reach, 0, block_size))
    skipped = np.where(padding, 0, np.clip(reach - window, 0, block_size) if window else 0)
    return usage.astype(np.int32), skipped.astype(np.int32)


def window_entries(num_entries: int, *, batch_size: int, query_len: int, window: int, block_size: int) -> int:
    """Return the size of a list that holds all blocks within a window at any position.

    Args:
        num_entries: Of the list of all blocks.
        batch_size: B.
        query_len: Q.
        window: Tokens that a query sees, at least 1.
        block_size: S.
    """
    span = window + query_len - 1
    return min(num_entries, batch_size * ((span + block_size - 2) // block_size + 1))


def token_slots(
    tables: Int32Array,
    rows: Int32Array,
    starts: Int32Array,
    query_lens: Int32Array,
    *,
    batch_size: int,
    query_len: int,
    block_size: int,
    padding_block: int,
) -> Int64Array:
    """Return the slot that each query's keys and values go to, ``[B, Q]``; padding goes round the padding block.

    Args:
        tables: Block tables of all rows.
        rows: int32 ``[n]``.
        starts: First query position of each.
        query_lens: Queries of each, 1 .. Q.
        batch_size: B.
        query_len: Q.
        block_size: S.
        padding_block: Written to by padding.
    """
    around = np.arange(batch_size * query_len, dtype=np.int64).reshape(batch_size, query_len) % block_size
    slots = padding_block * block_size + around
    positions = query_positions(starts, query_lens, query_len=query_len)
    real = np.arange(query_len) < query_lens[:, None]
    places = tables[rows[:, None], positions // block_size].astype(np.int64) * block_size + positions % block_size
    slots[: len(rows)] = np.where(real, places, slots[: len(rows)])
    return slots
