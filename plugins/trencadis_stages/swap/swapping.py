"""Preemption by swap: blocks of preempted sequences wait in host memory, and nothing of them is computed twice.

    preempt   device blocks ──copy out──▶ host blocks      the device blocks are free at once: copies run in order with steps
    admit     device blocks ◀──copy in─── host blocks      only what the prefix cache does not hold any more

Copies are noted while a plan is made and handed to the executor together, after every batch submitted so far: so the KV of the
step in flight is in what is copied out, and a block that is given to another sequence is read before it is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import numpy as np

from trencadis.config import Config
from trencadis.engine.sequences import Claim, Leaving, Sequence
from trencadis.engine.stage import EngineParts, Makings, Stage
from trencadis.engine.step import SubmittedStep
from trencadis.errors import ConfigValueError, InternalError, RanksLostError
from trencadis.interfaces import AllocationPlan, BlockCopies, SupportsSwapping
from trencadis.interfaces.restorable import Restorable
from trencadis.records import Int32Array, Plan

__all__ = ["HostBlockSnapshot", "Swapping"]


@attrs.frozen(kw_only=True)
class HostBlockSnapshot:
    """The KV blocks in host memory.

    Attributes:
        num_blocks: All blocks.
        num_swapped: Sequences that hold some.
        held: Host blocks of swapped-out sequences, by slot, in order of their tokens.
        free: Ids of the free blocks; the last is taken first.
        copied_in: Ids of blocks that are copied to the device before the next step, and free after it.
    """

    num_blocks: int
    num_swapped: int
    held: Mapping[int, tuple[int, ...]]
    free: tuple[int, ...]
    copied_in: tuple[int, ...]


@attrs.frozen(eq=False)
class _Copy:
    """Blocks of one sequence that are to be copied, in table order."""

    sequence: Sequence
    device: Int32Array
    host: Int32Array


class _Swapped(Claim):
    """What a preempted sequence has in host memory.

    Args:
        swapping: The stage that keeps it.
        host: Host blocks, in order of the sequence's tokens.
        num_tokens: Tokens whose KV is in them.
    """

    def __init__(self, swapping: Swapping, host: Int32Array, num_tokens: int) -> None:
        self.host = host
        self.num_tokens = num_tokens
        self._swapping = swapping

    def begin(self, sequence: Sequence, blocks: Int32Array, *, num_found: int) -> bool:
        """Note the copy to the device of what the prefix cache does not hold."""
        self._swapping.swap_in(sequence, self, blocks, num_found=num_found)
        return True

    def drop(self, sequence: Sequence) -> None:
        """Free the host blocks; no copy to them is made that was not handed over."""
        self._swapping.forget(sequence, self)


class Swapping(Stage, Restorable):
    """The host blocks of one engine, and the copies of the plan in the making.

    Each partition of the device's blocks has as many host blocks; those of the first come first.

    Args:
        makings: Configuration, model and executor.

    Attributes:
        num_host_blocks: Host blocks 0 .. num_host_blocks - 1.
        num_free: Those that hold nothing.
        num_swapped: Sequences whose blocks are in host memory.
    """

    restored = ("num_free", "num_swapped", "_num_free", "_num_fallbacks", "_stacks", "_held")

    def __init__(self, makings: Makings) -> None:
        self._makings = makings
        self.num_swapped = self.num_host_blocks = self.num_free = 0
        self._held: dict[int, list[Any]] = {}  # host blocks and tokens by slot
        self._outs: list[_Copy] = []
        self._ins: list[_Copy] = []
        self._num_fallbacks = 0

    def allocate(self, plan: AllocationPlan) -> AllocationPlan:
        """Ask for host blocks."""
        config, makings = self._makings.config, self._makings
        num_partitions = makings.layout.num_partitions
        self.num_host_blocks = self.num_free = num_host_blocks(config, makings, plan, num_partitions=num_partitions)
        size = self._num_per_partition = self.num_host_blocks // num_partitions
        # The lowest ids first, in ascending runs: neighbours are copied together.
        self._stacks: list[Int32Array] = [
            np.arange((one + 1) * size - 1, one * size - 1, -1, dtype=np.int32) for one in range(num_partitions)
        ]
        self._num_free = [size] * num_partitions
        return attrs.evolve(plan, num_host_blocks=self.num_host_blocks)

    def bind(self, engine: EngineParts) -> None:
        """Take the state, and what copies blocks."""
        self._state, self._executor = engine.state, engine.executor
        self._show()

    @property
    def has_copies(self) -> bool:
        """True if copies are noted that were not handed over."""
        return bool(self._outs or self._ins)

    def leaving(self, sequence: Sequence, leaving: Leaving) -> Claim | None:
        """Give a preempted sequence host blocks for what it has computed, if there is room; forget copies of one that ends."""
        if self._ins and any(copy.sequence is sequence for copy in self._ins):
            self._push(*(copy.host for copy in self._ins if copy.sequence is sequence))
            self._ins = [copy for copy in self._ins if copy.sequence is not sequence]
            self._show()
        blocks = leaving.blocks
        if leaving.reason is not None or not blocks.size:
            return None
        num_free = self._num_free[sequence.part]
        if len(blocks) > num_free:
            self._num_fallbacks += 1
            return None
        host = np.sort(self._stacks[sequence.part][num_free - len(blocks) : num_free])
        self._num_free[sequence.part] -= len(host)
        self.num_free -= len(host)
        self.num_swapped += 1
        slot, table = sequence.slot, self._state.table
        num_tokens = int(table.num_computed_tokens[slot])
        table.num_swapped_tokens[slot] = num_tokens
        self._held[slot] = [host, num_tokens]
        self._outs.append(_Copy(sequence, blocks, host))
        self._show()
        return _Swapped(self, host, num_tokens)

    def swap_in(self, sequence: Sequence, claim: _Swapped, blocks: Int32Array, *, num_found: int) -> None:
        """Fill the new device blocks of a sequence that was swapped out; its host blocks are free after the copy.

        Args:
            sequence: It is being admitted.
            claim: The claim that is kept for it.
            blocks: All its device blocks, in table order.
            num_found: Leading ones that the prefix cache held still.
        """
        host = claim.host
        missing = host[num_found:]
        self._push(host[:num_found])
        self._let_go(sequence)
        if missing.size:
            self._ins.append(_Copy(sequence, blocks[num_found : len(host)].copy(), missing))

    def forget(self, sequence: Sequence, claim: _Swapped) -> None:
        """Free the host blocks of a sequence, and make no copy for it that was not handed over."""
        self._push(claim.host)
        self._outs = [copy for copy in self._outs if copy.sequence is not sequence]
        sequence.is_approximate = False
        self._let_go(sequence)

    def failed(self, plans: Iterable[Plan], error: Exception) -> None:
        """Let whom the plans swapped out be computed again, and all whose device is gone.

        The step before may not have written what was copied, and the copies may be what failed.
        """
        slots = dict.fromkeys(slot for plan in plans for slot in plan.preempted.tolist())
        if isinstance(error, RanksLostError):
            slots = dict.fromkeys(self._held)
        for slot in slots:
            sequence = self._state.table.sequences[slot]
            if sequence is not None and isinstance(sequence.claim, _Swapped):
                self._state.drop_claim(sequence)

    def after_plan(self, step: SubmittedStep | None) -> None:
        """Hand the copies of the plan to the executor, before blocks move or its batch is submitted, and note their counts."""
        if step is None or not (self._outs or self._ins or self._num_fallbacks):
            return
        outs, self._outs = self._outs, []
        ins, self._ins = self._ins, []
        copies = _joined(outs, outwards=True), _joined(ins, outwards=False)
        step.stats.update(
            num_blocks_swapped_out=len(copies[0]),
            num_blocks_swapped_in=len(copies[1]),
            num_swap_fallbacks=self._num_fallbacks,
        )
        self._num_fallbacks = 0
        if not (outs or ins):
            return
        self._push(*(copy.host for copy in ins))
        self._show()
        if not isinstance(self._executor, SupportsSwapping):
            raise InternalError("blocks are swapped out, and the executor copies none")
        self._executor.swap_blocks(outs=copies[0], ins=copies[1])

    def restore_state(self, values: Mapping[str, Any]) -> None:
        """Take the host blocks of another engine, whose waiting sequences this one has."""
        super().restore_state(values)
        for slot, (host, num_tokens) in self._held.items():
            self._state.table.sequence(slot).claim = _Swapped(self, host, num_tokens)
        self._show()

    def inspect(self) -> HostBlockSnapshot:
        """Return a copy of what is kept here, for tests and debuggers."""
        return HostBlockSnapshot(
            num_blocks=self.num_host_blocks,
            num_swapped=self.num_swapped,
            held={slot: tuple(host.tolist()) for slot, (host, _) in self._held.items()},
            free=tuple(
                block
                for stack, num_free in zip(self._stacks, self._num_free, strict=True)
                for block in stack[:num_free].tolist()
            ),
            copied_in=tuple(block for copy in self._ins for block in copy.host.tolist()),
        )

    def _let_go(self, sequence: Sequence) -> None:
        del self._held[sequence.slot]
        self._state.table.num_swapped_tokens[sequence.slot] = 0
        self.num_swapped -= 1
        self._show()

    def _show(self) -> None:
        """Show policies and observers what is kept."""
        self._state.shown.update(num_swapped=self.num_swapped, num_free_host_blocks=self.num_free)
        self._state.gauges["num_swapped"] = self.num_swapped

    def _push(self, *freed: Int32Array) -> None:
        for host in freed:
            if host.size:
                partition = int(host[0]) // self._num_per_partition
                num_free = self._num_free[partition]
                self._stacks[partition][num_free : num_free + len(host)] = host[::-1]
                self._num_free[partition] += len(host)
                self.num_free += len(host)


def _joined(copies: list[_Copy], *, outwards: bool) -> BlockCopies:
    if not copies:
        return BlockCopies.none()
    device = np.concatenate([copy.device for copy in copies])
    host = np.concatenate([copy.host for copy in copies])
    return BlockCopies(sources=device, targets=host) if outwards else BlockCopies(sources=host, targets=device)


def num_host_blocks(config: Config, makings: Makings, plan: AllocationPlan, *, num_partitions: int = 1) -> int:
    """Return how many host blocks the config pays for, as many in each partition.

    Raises:
        ConfigValueError: Backend or executor cannot swap blocks, or there is no memory for one block.
    """
    executor = makings.executor
    if not executor.capabilities.swaps_blocks or not isinstance(executor, SupportsSwapping):
        who = "executor" if executor.capabilities.swaps_blocks else "backend"
        raise ConfigValueError(
            f'[engine] preemption = "swap": the {who} "{getattr(config, who).name}" cannot copy KV blocks to host memory.',
            hint=f'Set it to "recompute", or choose another {who}.',
        )
    block_bytes = max(1, makings.model.kv_bytes_per_token * plan.block_size)
    count = config.cache.swap_bytes // block_bytes // num_partitions * num_partitions
    if not count:
        raise ConfigValueError(
            f'[cache] swap_bytes = {config.cache.swap_bytes}: with [engine] preemption = "swap" it must hold at least one '
            f"KV block of {block_bytes} bytes{' for each rank' if num_partitions > 1 else ''}.",
            hint='Raise it, to several GiB of host memory if there are, or set engine.preemption to "recompute".',
        )
    # As many as every running sequence at full length holds: who is swapped out was running.
    return int(min(count, config.engine.max_num_seqs * -(-plan.max_model_len // plan.block_size)))
