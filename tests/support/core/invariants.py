"""What must hold of an engine between any two calls, checked from its snapshot.

The shadow accounting here is written from the definitions and shares no code with the engine. Numbers in messages are those of
the list of scheduler invariants in :mod:`support.core.engine_machine`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING

from trencadis.records import Batch
from trencadis_stages.swap.swapping import HostBlockSnapshot
from trencadis_stages.transfer.snapshot import TransferSnapshot

if TYPE_CHECKING:
    from trencadis.api import Engine
    from trencadis.engine.inspect.snapshot import EngineSnapshot

_NO_TRANSFERS = TransferSnapshot(loads=(), pinned={})
_NO_HOST_BLOCKS = HostBlockSnapshot(num_blocks=0, num_swapped=0, held={}, free=(), copied_in=())

__all__ = ["broken_invariants", "broken_partitions", "broken_plan_rules", "broken_writes"]


def broken_invariants(engine: Engine, *, withheld: Collection[int] = ()) -> list[str]:
    """Return every broken invariant in words; an empty list means all hold. Changes nothing.

    Args:
        engine: The engine.
        withheld: Blocks that a test itself took from the block manager.
    """
    now = engine.inspect()
    faults: list[str] = []
    slots = now.by_slot
    transfers = now.stages.get("transfer", _NO_TRANSFERS)
    places = Counter([*now.waiting, *now.running, *now.aside])
    if set(places) != set(slots) or any(count > 1 for count in places.values()):
        faults.append(
            f"1, 2: live {sorted(slots)}, but waiting {now.waiting}, running {now.running}, aside {now.aside}"
        )
    if len(now.running) > now.num_rows:
        faults.append(f"5: {len(now.running)} sequences run on {now.num_rows} rows")
    holders: Counter[int] = Counter(withheld)
    for slot in now.running:
        sequence = slots[slot]
        holders.update(sequence.block_table)
        if sequence.num_computed_tokens > len(sequence.block_table) * now.block_size:
            faults.append(f"10: slot {slot} computes tokens that have no block")
        if sequence.num_computed_tokens > sequence.num_tokens or sequence.num_tokens > now.max_model_len:
            faults.append(f"6: slot {slot} has more computed than known tokens, or too many")
    for slot in now.waiting:
        if slots[slot].row >= 0 or slots[slot].block_table:
            faults.append(f"13: slot {slot} waits and holds a row or blocks")
        holders.update(slots[slot].claimed_blocks)
    for pinned in transfers.pinned.values():
        holders.update(pinned)
    for load in transfers.loads:
        holders.update(load.blocks)
        if load.layerwise and (load.slot not in now.running or not slots[load.slot].is_provisional):
            faults.append(f"1, 2: slot {load.slot} does not run beside its load")
        if load.layerwise and any(block in now.blocks.hashes for block in load.blocks):
            faults.append(f"9: blocks of slot {load.slot} can be found before they are loaded")
    faults += _block_faults(now, holders) + _host_faults(now)
    rows = [slots[slot].row for slot in now.running]
    if len(set(rows)) != len(rows) or len(rows) + now.num_free_rows != now.num_rows:
        faults.append(f"2: rows {rows} are shared or lost")
    return faults


def broken_partitions(engine: Engine, num_ranks: int) -> list[str]:
    """Return which sequences have something of two ranks that each have sequences of their own, in words. Changes nothing."""
    if num_ranks == 1:
        return []
    now = engine.inspect()
    num_rows, num_blocks = now.num_rows // num_ranks, now.blocks.num_blocks // num_ranks
    host = now.stages.get("swap", _NO_HOST_BLOCKS)
    num_hosted = max(1, host.num_blocks // num_ranks)
    faults = []
    for name, one in now.sequences.items():
        ranks = {block // num_blocks for block in one.block_table}
        ranks |= {block // num_hosted for block in host.held.get(one.slot, ())}
        ranks |= {one.row // num_rows} if one.row >= 0 else set()
        if len(ranks) > 1:
            faults.append(f"9: {name} has row and blocks of ranks {sorted(ranks)}")
    return faults


def _block_faults(now: EngineSnapshot, holders: Counter[int]) -> list[str]:
    blocks = now.blocks
    faults = [
        f"9: block {block} is held {holders[block]} times, its reference count is {count}"
        for block, count in enumerate(blocks.ref_counts)
        if count != holders[block]
    ]
    free, num_used = set(blocks.free), sum(count > 0 for count in blocks.ref_counts)
    if len(free) != len(blocks.free) or free & blocks.cached or (free | blocks.cached) & set(holders):
        faults.append("9: a block is in two of free, cached and used")
    if len(blocks.free) + len(blocks.cached) + num_used != blocks.num_blocks:
        faults.append("9: a block is in none of free, cached and used")
    if (blocks.num_free, blocks.num_cached, blocks.num_used) != (len(blocks.free), len(blocks.cached), num_used):
        faults.append("9: free, cached or used blocks are miscounted")
    found = {block_hash: block for block, block_hash in blocks.hashes.items()}
    faults += [
        f"9: block {found[after]} can be found only through one that is gone"
        for after, before in blocks.previous.items()
        if before not in found
    ]
    return faults


def _host_faults(now: EngineSnapshot) -> list[str]:
    """13: who was swapped out waits, and host blocks are free, held by one sequence, or about to be copied back."""
    host, faults = now.stages.get("swap", _NO_HOST_BLOCKS), []
    held = [*host.free, *host.copied_in]
    for slot, blocks in host.held.items():
        held += blocks
        sequence = now.by_slot[slot]
        if sequence.row >= 0 or len(blocks) * now.block_size < sequence.num_claimed_tokens:
            faults.append(f"13: slot {slot} runs and is swapped out, or its tokens have no host block")
    if sorted(held) != list(range(host.num_blocks)) or len(host.held) != host.num_swapped:
        faults.append(f"13: host blocks {sorted(held)} of {host.num_blocks}, {len(host.held)} sequences swapped out")
    return faults


def broken_plan_rules(batch: Batch, *, token_budget: int, max_num_seqs: int) -> list[str]:
    """Return what is wrong with a batch by itself, in words. Pure.

    Args:
        batch: What the executor was given.
        token_budget: ``max_num_batched_tokens``.
        max_num_seqs: Rows.
    """
    faults: list[str] = []
    scheduled = sum(int(one.query_lens.sum()) for one in batch.passes)
    if scheduled > token_budget:
        faults.append(f"4: {scheduled} tokens in a step of {token_budget}")
    rows = [row for one in batch.passes for row in one.rows.tolist()]
    if len(set(rows)) != len(rows) or len(rows) > max_num_seqs:
        faults.append(f"5, 8: rows {rows} of {max_num_seqs}")
    for one in batch.passes:
        if one.query_lens.min() < 1:
            faults.append("4: an empty entry")
        as_rows = int(one.query_lens.max()) <= one.bucket.query_len and len(one.rows) <= one.bucket.batch_size
        as_one_row = one.bucket.batch_size == 1 and int(one.query_lens.sum()) <= one.bucket.query_len
        if not as_rows and not as_one_row:
            faults.append(f"31: {one.bucket} does not hold its pass")
    return faults


def broken_writes(batch: Batch, now: EngineSnapshot) -> list[str]:
    """Return which writes of a batch go nowhere, to blocks that others read, or to blocks that a transfer holds. Pure.

    Args:
        batch: What the executor was given.
        now: The engine when it was.
    """
    transfers = now.stages.get("transfer", _NO_TRANSFERS)
    borrowed = {block for load in transfers.loads if not load.layerwise for block in load.written}
    borrowed |= {block for pinned in transfers.pinned.values() for block in pinned}
    tables = {sequence.row: sequence.block_table for sequence in now.sequences.values()}
    faults: list[str] = []
    for one in batch.passes:
        for row, start, length in zip(one.rows.tolist(), one.starts.tolist(), one.query_lens.tolist(), strict=True):
            table, span = tables.get(row, ()), f"row {row} writes tokens {start} to {start + length}"
            if start + length > len(table) * now.block_size:
                faults.append(f"10: {span}, and not all have a block")
                continue
            blocks = table[start // now.block_size : -(-(start + length) // now.block_size)]
            if any(now.blocks.ref_counts[block] != 1 for block in blocks):
                faults.append(f"11: {span} into shared blocks")
            if borrowed & set(blocks):
                faults.append(f"11: {span} into blocks that a transfer holds")
    return faults
