"""Blocks that a pass reads and slots that it writes, as arrays with sizes determined by the bucket. NumPy on the host, pure.

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
    """Blocks of sequences, concatenated; parallel arrays, int64 ``[num_blocks]``.

    Attributes:
        blocks: Block ids.
        groups: Index of the sequence of each block.
        columns: Index of each block within its sequence.
    """

    blocks: Int64Array
    groups: Int64Array
    columns: Int64Array


@attrs.frozen(kw_only=True)
class BlockLists:
    """Padded list of blocks; parallel arrays, int64 ``[N]``.

    Attributes:
        blocks: Block ids; entries of padding hold the padding block.
        groups: Index of the sequence of each block; -1 in padding.
        columns: Index of each block within its sequence; 0 in padding.
    """

    blocks: Int64Array
    groups: Int64Array
    columns: Int64Array


def owned_blocks(tables: Int32Array, rows: Int32Array, firsts: Int32Array, ends: Int32Array) -> OwnedBlocks:
    """Return the blocks in columns ``firsts`` up to ``ends`` of rows.

    Args:
        tables: Block tables of all rows, int32 ``[num_rows, num_columns]``.
        rows: Row of each sequence, int32 ``[n]``.
        firsts: First column of each sequence, int32 ``[n]``.
        ends: Column after the last one of each sequence, int32 ``[n]``.
    """
    counts = ends - firsts
    groups = np.repeat(np.arange(len(rows)), counts)
    columns = np.arange(len(groups)) - np.repeat(np.cumsum(counts) - counts - firsts, counts)
    return OwnedBlocks(blocks=tables[rows[groups], columns].astype(np.int64), groups=groups, columns=columns)


def gathered_lists(owned: OwnedBlocks, *, num_entries: int, padding_block: int) -> BlockLists:
    """Return lists in the order of the sequences, for blocks that are gathered by id.

    Args:
        owned: Blocks, at most ``num_entries``.
        num_entries: Length of the list, N.
        padding_block: Block id of padding entries.
    """
    return _spread(owned, np.arange(len(owned.blocks)), num_entries, padding_block)


def ranged_lists(owned: OwnedBlocks, *, num_entries: int, padding_block: int) -> BlockLists:
    """Return lists whose entry ``i`` is block ``i``, for a cache that is read from its first block on without a copy.

    A block of two sequences is assigned to the later one; blocks read by range must not be shared.

    Args:
        owned: Blocks with ids below ``num_entries``.
        num_entries: Length of the list, N.
        padding_block: Block id of entries that no sequence owns.
    """
    return _spread(owned, owned.blocks, num_entries, padding_block)


def _spread(owned: OwnedBlocks, places: Int64Array, num_entries: int, padding_block: int) -> BlockLists:
    blocks = np.full(num_entries, padding_block, np.int64)
    groups = np.full(num_entries, -1, np.int64)
    columns = np.zeros(num_entries, np.int64)
    blocks[places], groups[places], columns[places] = owned.blocks, owned.groups, owned.columns
    return BlockLists(blocks=blocks, groups=groups, columns=columns)


def query_positions(starts: Int32Array, query_lens: Int32Array, *, query_len: int) -> Int64Array:
    """Return the position of each query of the real sequences, ``[n, Q]``; padding repeats the last real position."""
    steps = np.minimum(np.arange(query_len, dtype=np.int64), query_lens[:, None] - 1)
    return starts[:, None].astype(np.int64) + steps


def seen_slots(
    lists: BlockLists, positions: Int64Array, *, block_size: int, window: int = 0
) -> tuple[Int32Array, Int32Array]:
    """Return the slots of each block that the queries of its sequence see, from ``skipped`` up to ``usage``.

    The results are integers, unlike in the source, since bfloat16 does not represent every number up to the largest block size.

    Args:
        lists: Padded list of blocks with N entries.
        positions: Positions of the queries of the real sequences, int64 ``[n, Q]``.
        block_size: Tokens per block, S.
        window: Tokens that a query sees, itself included; 0: all.

    Returns:
        ``usage``: end of the slots that a query sees, int32 ``[N, Q]``, 0 .. S; 1 in padding, so that no softmax over a
        block is empty there. ``skipped``: slots before the window, int32 ``[N, Q]``, 0 .. S.
    """
    padding = (lists.groups < 0)[:, None]
    # The last row is for padding, whose index is -1.
    extended = np.append(positions, np.zeros((1, positions.shape[1]), np.int64), axis=0)
    reach = extended[lists.groups] + 1 - lists.columns[:, None] * block_size
    usage = np.where(padding, 1, np.clip(reach, 0, block_size))
    skipped = np.where(padding, 0, np.clip(reach - window, 0, block_size) if window else 0)
    return usage.astype(np.int32), skipped.astype(np.int32)


def window_entries(num_entries: int, *, batch_size: int, query_len: int, window: int, block_size: int) -> int:
    """Return the size of a list that holds all blocks within a window at any position.

    Args:
        num_entries: Length of the list of all blocks.
        batch_size: Sequences of the bucket, B.
        query_len: Queries of each sequence, Q.
        window: Tokens that a query sees, at least 1.
        block_size: Tokens per block, S.
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
    """Return the slot of each query's keys and values, ``[B, Q]``; padding uses the slots of the padding block in turn.

    Args:
        tables: Block tables of all rows, int32 ``[num_rows, num_columns]``.
        rows: Row of each sequence, int32 ``[n]``.
        starts: Position of the first query of each sequence, int32 ``[n]``.
        query_lens: Number of queries of each sequence, int32 ``[n]``, 1 to Q.
        batch_size: Sequences of the bucket, B.
        query_len: Queries of each sequence, Q.
        block_size: Tokens per block, S.
        padding_block: Block id that padding writes to.
    """
    around = np.arange(batch_size * query_len, dtype=np.int64).reshape(batch_size, query_len) % block_size
    slots = padding_block * block_size + around
    positions = query_positions(starts, query_lens, query_len=query_len)
    real = np.arange(query_len) < query_lens[:, None]
    places = tables[rows[:, None], positions // block_size].astype(np.int64) * block_size + positions % block_size
    slots[: len(rows)] = np.where(real, places, slots[: len(rows)])
    return slots
