"""Keeps the blocks in use at low ids, for backends whose decode passes read blocks by range.

There the cost of a decode pass follows the highest block id in use, not the number of blocks::

    ids    0 1 2 3 4 5 6 7 8 9          0 1 2 3 4 5 6 7 8 9
    used   ■ ■ ▫ ▫ ■ ▫ ▫ ▫ ▫ ■    ▶     ■ ■ ■ ■ ▫ ▫ ▫ ▫ ▫ ▫
           └── reads 10 blocks ─┘       └reads 4┘

Contents are swapped, so cached blocks stay valid wherever they are. Only blocks held by sequences of the current plan move, and by
no other: what a transfer, a load in flight or a preempted sequence refers to stays where it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from trencadis.config.schema import DefragmenterConfig
from trencadis.engine.stage import EngineParts, Makings, Stage
from trencadis.engine.state import BlockManager, EngineState
from trencadis.engine.step import SubmittedStep
from trencadis.errors import ConfigValueError
from trencadis.interfaces.restorable import Restorable
from trencadis.records import Int32Array, Plan

__all__ = ["Defragmenter", "Defragmenting", "choose_swaps", "make_defragmenting"]

logger = logging.getLogger("trencadis.engine")

_COPY_COST = 4
"""What a swap of two blocks costs, in blocks read: two are read and two are written."""


class Defragmenting(Stage, Restorable):
    """Keeps the blocks of each partition at low ids; used after a plan is made and before its batch is built.

    Args:
        makings: Configuration and executor.
    """

    restored = ("_wasted",)

    def __init__(self, makings: Makings) -> None:
        self._config = makings.config.defragmenter
        self._copy_sizes = makings.executor.capabilities.copy_sizes
        self.parts: tuple[Defragmenter, ...] = ()

    def bind(self, engine: EngineParts) -> None:
        """Take the blocks, and what copies them."""
        executor = engine.executor
        self.parts = tuple(
            Defragmenter(
                engine.state,
                self._config,
                copy_blocks=lambda sources, targets: executor.copy_blocks(sources=sources, targets=targets),
                copy_sizes=self._copy_sizes,
                blocks=blocks,
            )
            for blocks in engine.state.blocks.parts
        )

    def after_plan(self, step: SubmittedStep | None) -> None:
        """Move blocks where it pays."""
        if step is not None:
            num_swaps = sum([part.run(step.plan) for part in self.parts])
            if num_swaps:
                step.stats["num_block_swaps"] = num_swaps

    @property
    def _wasted(self) -> list[int]:
        return [part.wasted for part in self.parts]

    @_wasted.setter
    def _wasted(self, values: list[int]) -> None:
        for part, value in zip(self.parts, values, strict=True):
            part.wasted = value


def make_defragmenting(makings: Makings) -> Defragmenting | None:
    """Return what keeps blocks at low ids; None where that saves nothing.

    Raises:
        ConfigValueError: It is asked for beside a KV connector, which knows blocks by their ids.
    """
    capabilities, connected = makings.executor.capabilities, makings.made("kv_connector") is not None
    is_wanted = makings.config.defragmenter.enabled == "on"
    if is_wanted and connected:
        raise ConfigValueError(
            '[defragmenter] enabled = "on": the KV connector refers to blocks by their ids, so they cannot move.',
            hint='Set it to "auto", or kv_connector.name to "none".',
        )
    reads_ranges = capabilities.contiguous or capabilities.layout == "unified"
    return Defragmenting(makings) if not connected and (is_wanted or reads_ranges) else None


class Defragmenter:
    """Moves blocks of one partition between two steps, on the engine's thread.

    Args:
        state: The engine's state: blocks and block tables change.
        config: Table ``[defragmenter]``.
        blocks: Those that it keeps at low ids: all of the state, or a partition's.
        copy_blocks: Copies on the device, after every batch submitted so far; reads every source before it writes any target.
        copy_sizes: How many blocks are copied at once, ascending; fewer are padded to the next, more take several calls. Empty: any
            number.

    Attributes:
        num_runs: How often blocks were moved.
        num_swaps: Pairs of blocks that changed places.
        wasted: Blocks read in vain since blocks were moved last.
    """

    def __init__(
        self,
        state: EngineState,
        config: DefragmenterConfig,
        *,
        blocks: BlockManager,
        copy_blocks: Callable[[Int32Array, Int32Array], None],
        copy_sizes: Sequence[int] = (),
    ) -> None:
        self._state = state
        self._blocks = blocks
        self._config = config
        self._copy_blocks = copy_blocks
        self._copy_sizes = tuple(copy_sizes)
        self.wasted = 0
        self._log = _UpdateLog() if config.log_moves else None
        self.num_runs = 0
        self.num_swaps = 0

    def run(self, plan: Plan) -> int:
        """Move blocks if it pays; returns the number of swaps. O(num_blocks), about 10 µs for 4096 blocks when there is nothing to do."""
        blocks = self._blocks
        used = _ids(blocks, _counts(blocks) > 0)
        if self._log is not None:
            self._log.update(blocks, self._state)
        if not used.size or not self._is_due(used - blocks.first):
            return 0
        movable = self._movable(plan)
        free = _ids(blocks, _counts(blocks) == 0)
        sources, targets = choose_swaps(used[movable[used]], free=free, max_swaps=self._config.max_swaps)
        if sources.size:
            self._swap(plan, sources, targets)
            if self._log is not None:
                highest = int(_ids(blocks, _counts(blocks) > 0)[-1])
                logger.info(
                    "[defrag] defragmentation done max_id_used=%d->%d num_used=%d swapped=%d/%d",
                    *(int(used[-1]), highest, len(used), len(sources), self._num_padded_swaps(len(sources))),
                )
        self.wasted = 0
        return len(sources)

    def _is_due(self, used: Int32Array) -> bool:
        """Whether to move now.

        ``threshold``: the highest id exceeds the number of used blocks by more than the threshold. ``cost``: blocks read in vain
        since the last move would have paid for the move. Whatever comes, that costs at most twice what the best choice in
        hindsight costs: it is the rent-or-buy rule, and it needs no threshold and never moves back and forth.

        Sources: vllm-gaudi, extension/defragmentation.py (threshold); Karlin, Manasse, Rudolph, Sleator, "Competitive snoopy
        caching", Algorithmica 3 (1988) (rent or buy).
        """
        config = self._config
        highest, num_used = int(used[-1]), len(used)
        if config.trigger == "threshold":
            return highest - config.threshold > num_used
        excess = highest + 1 - num_used
        if excess <= 0:
            return False
        self.wasted += excess
        num_moves = min(int(np.count_nonzero(used >= num_used)), config.max_swaps)
        return self.wasted >= _COPY_COST * self._num_padded_swaps(num_moves)

    def _num_padded_swaps(self, num_swaps: int) -> int:
        """Return how many pairs are moved, padding included. Pure."""
        if not self._copy_sizes:
            return num_swaps
        most = self._copy_sizes[-1] // 2
        whole, rest = divmod(num_swaps, most)
        return whole * most + next(size // 2 for size in (0, *self._copy_sizes) if size >= 2 * rest)

    def _movable(self, plan: Plan) -> Int32Array:
        """Return, by block, whether all its holders are sequences of the plan; bool ``[num_blocks]``."""
        state = self._state
        held = [state.blocks_of(state.table.sequence(slot)) for slot in plan.slots.tolist()]
        counts = np.bincount(np.concatenate(held), minlength=state.blocks.num_blocks) if held else 0
        movable: Int32Array = (state.blocks.ref_counts > 0) & (counts == state.blocks.ref_counts)
        return movable

    def _swap(self, plan: Plan, sources: Int32Array, targets: Int32Array) -> None:
        state = self._state
        most = self._copy_sizes[-1] // 2 if self._copy_sizes else len(sources)
        for first in range(0, len(sources), most):
            pair = sources[first : first + most], targets[first : first + most]
            # Both ways: a target may hold cached content, and what was there before must not be lost.
            self._copy_blocks(np.concatenate(pair), np.concatenate(pair[::-1]))
        self._blocks.exchange(sources, targets)
        renamed = np.arange(state.blocks.num_blocks, dtype=np.int32)
        renamed[sources] = targets
        for slot in plan.slots.tolist():
            row = int(state.table.row[slot])
            ids = state.blocks_of(state.table.sequence(slot))
            columns = np.flatnonzero(renamed[ids] != ids).astype(np.int32)
            if columns.size:
                state.rows.write_blocks(np.full(len(columns), row, np.int32), columns, renamed[ids[columns]])
        self.num_runs += 1
        self.num_swaps += len(sources)


class _UpdateLog:
    """Says in the vendor plugin's words what changed since it was last asked; it has a state of its own for nothing else."""

    def __init__(self) -> None:
        self._used: npt.NDArray[np.bool_] | None = None
        self._request_ids: set[str] = set()
        logger.info("[defrag] initialized")

    def update(self, blocks: BlockManager, state: EngineState) -> None:
        """Log how many blocks came into use and how many requests ended."""
        used, request_ids = _counts(blocks) > 0, set(state.slot_of)
        num_new = int(np.count_nonzero(used if self._used is None else used & ~self._used))
        num_finished = len(self._request_ids - request_ids)
        self._used, self._request_ids = used, request_ids
        if num_new or num_finished:
            logger.info("[defrag] updating state: %d new_blocks %d finished reqs", num_new, num_finished)


def choose_swaps(used: Int32Array, *, free: Int32Array, max_swaps: int) -> tuple[Int32Array, Int32Array]:
    """Return which blocks move where: the highest used ids to the lowest free ones, while that lowers them. Pure.

    Args:
        used: Ids that may move, ascending.
        free: Ids without references, ascending.
        max_swaps: The most pairs.

    Returns:
        Sources and targets, int32 ``[num_swaps]``.

    Source: vllm-gaudi, extension/defragmentation.py.
    """
    count = min(len(used), len(free), max_swaps)
    sources, targets = used[::-1][:count], free[:count]
    keep = int(np.count_nonzero(sources > targets))  # sources fall and targets rise: a prefix
    return sources[:keep].astype(np.int32), targets[:keep].astype(np.int32)


def _counts(blocks: BlockManager) -> Int32Array:
    return blocks.ref_counts[blocks.first : blocks.first + blocks.num_blocks]


def _ids(blocks: BlockManager, chosen: npt.NDArray[np.bool_]) -> Int32Array:
    """Return the ids of some of the blocks, ascending."""
    return (blocks.first + np.flatnonzero(chosen)).astype(np.int32)
