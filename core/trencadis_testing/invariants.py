"""What must hold of an engine between any two calls, checked from the outside in.

The shadow accounting here is written from the definitions and shares no code with the engine. Numbers in messages are those of
the list of scheduler invariants that the tests are named after.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from trencadis.records import Batch

if TYPE_CHECKING:
    from trencadis.engine.engine import Engine
    from trencadis.engine.state import EngineState

__all__ = ["blocks_withheld", "broken_invariants", "broken_plan_rules", "transfer_blocks"]


def broken_invariants(engine: Engine) -> list[str]:
    """Return every broken invariant in words; an empty list means all hold. Changes nothing."""
    state = engine._state  # noqa: SLF001 - shadow accounting looks inside
    table, blocks = state.table, state.blocks
    faults: list[str] = []
    live = set(state.slot_of.values())
    waiting, running = state.waiting.slots.tolist(), state.running.tolist()
    loading = [load.sequence.slot for load in state.transfers._loads.values()]  # noqa: SLF001
    places = Counter([*waiting, *running, *loading])
    if set(places) != live or any(count > 1 for count in places.values()):
        faults.append(f"1, 2: live {sorted(live)}, but waiting {waiting}, running {running}, loading {loading}")
    if len(running) > state.rows.tokens.shape[0]:
        faults.append(f"5: {len(running)} sequences run on {state.rows.tokens.shape[0]} rows")
    holders: Counter[int] = Counter()
    for slot in running:
        holders.update(state.blocks_of(table.sequence(slot)).tolist())
        if table.num_computed_tokens[slot] > table.num_blocks[slot] * state.block_size:
            faults.append(f"10: slot {slot} computes tokens that have no block")
        if table.num_computed_tokens[slot] > table.num_tokens[slot] or table.num_tokens[slot] > state.max_model_len:
            faults.append(f"6: slot {slot} has more computed than known tokens, or too many")
    for slot in waiting:
        sequence = table.sequence(slot)
        if table.row[slot] >= 0 or table.num_blocks[slot]:
            faults.append(f"13: slot {slot} waits and holds a row or blocks")
        if sequence.loaded_blocks is not None:
            holders.update(sequence.loaded_blocks.tolist())
    transfers = state.transfers
    for held in (*transfers._pinned.values(), *(load.blocks for load in transfers._loads.values())):  # noqa: SLF001
        holders.update(held.tolist())
    for load in transfers.layered:
        holders.update(load.blocks.tolist())
        if load.sequence.slot not in running or load.sequence.transfer_id < 0:
            faults.append(f"1, 2: slot {load.sequence.slot} does not run beside its load")
        if any(block in blocks._hash_of for block in load.blocks.tolist()):  # noqa: SLF001
            faults.append(f"9: blocks of slot {load.sequence.slot} can be found before they are loaded")
    faults += _block_faults(engine, holders) + _host_faults(state)
    rows = [int(table.row[slot]) for slot in running]
    if len(set(rows)) != len(rows) or len(rows) + state.rows.num_free != state.rows.tokens.shape[0]:
        faults.append(f"2: rows {rows} are shared or lost")
    if blocks.num_free + blocks.num_cached + blocks.num_used != blocks.num_blocks:
        faults.append("9: free + cached + used is not all")
    return faults


def _block_faults(engine: Engine, holders: Counter[int]) -> list[str]:
    blocks = engine._state.blocks  # noqa: SLF001
    faults = [
        f"9: block {block} is held {holders[block]} times, its reference count is {count}"
        for block, count in enumerate(blocks.ref_counts.tolist())
        if count != holders[block] + blocks_withheld(engine).get(block, 0)
    ]
    free = blocks._stack[: blocks.num_free].tolist()  # noqa: SLF001
    cached = blocks._cached  # noqa: SLF001
    if len(set(free)) != len(free) or set(free) & cached or (set(free) | cached) & set(holders):
        faults.append("9: a block is in two of free, cached and used")
    if len(free) + len(cached) + sum(count > 0 for count in blocks.ref_counts.tolist()) != blocks.num_blocks:
        faults.append("9: a block is in none of free, cached and used")
    faults += [
        f"9: block {blocks._block_of[after]} can be found only through one that is gone"  # noqa: SLF001
        for after, before in blocks._previous.items()  # noqa: SLF001
        if before not in blocks._block_of  # noqa: SLF001
    ]
    return faults


def _host_faults(state: EngineState) -> list[str]:
    """13: who was swapped out waits, and host blocks are free, held by one sequence, or about to be copied back."""
    swapping, table = state.swapping, state.table
    faults: list[str] = []
    held: list[int] = swapping._stack[: swapping.num_free].tolist()  # noqa: SLF001
    num_swapped = 0
    for slot in state.slot_of.values():
        sequence = table.sequence(slot)
        if sequence.host_blocks is not None:
            num_swapped += 1
            held += sequence.host_blocks.tolist()
            if table.row[slot] >= 0 or len(sequence.host_blocks) * state.block_size < table.num_swapped_tokens[slot]:
                faults.append(f"13: slot {slot} runs and is swapped out, or its tokens have no host block")
    held += [block for copy in swapping._ins for block in copy.host.tolist()]  # noqa: SLF001
    if sorted(held) != list(range(swapping.num_host_blocks)) or num_swapped != swapping.num_swapped:
        faults.append(
            f"13: host blocks {sorted(held)} of {swapping.num_host_blocks}, {num_swapped} sequences swapped out"
        )
    return faults


def blocks_withheld(engine: Engine) -> dict[int, int]:
    """Return the references a test itself took from the block manager, by block."""
    return getattr(engine, "_withheld_by_test", {})


def transfer_blocks(state: EngineState) -> set[int]:
    """Return the blocks that KV transfers may write to or read from now: those of loads in flight, and pinned ones."""
    transfers = state.transfers
    found: set[int] = set()
    for load in transfers._loads.values():  # noqa: SLF001 - shadow accounting looks inside
        found.update(load.blocks[load.first : load.last].tolist())
    for held in transfers._pinned.values():  # noqa: SLF001
        found.update(held.tolist())
    return found


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
