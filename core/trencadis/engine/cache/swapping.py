"""Preemption by swap: blocks of preempted sequences wait in host memory, and nothing of them is computed twice.

    preempt   device blocks ──copy out──▶ host blocks      the device blocks are free at once: copies run in order with steps
    admit     device blocks ◀──copy in─── host blocks      only what the prefix cache does not hold any more

Copies are noted while a plan is made and handed to the executor together, after every batch submitted so far: so the KV of the
step in flight is in what is copied out, and a block that is given to another sequence is read before it is written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs
import numpy as np

from trencadis.config.schema import Config
from trencadis.engine.inspect.snapshot import HostBlockSnapshot
from trencadis.engine.restorable import Restorable
from trencadis.engine.sequences import Sequence
from trencadis.engine.stages import Stage
from trencadis.errors import ConfigValueError, InternalError
from trencadis.interfaces import BlockCopies, Executor, SupportsSwapping
from trencadis.records import Batch, Int32Array, ModelFacts

if TYPE_CHECKING:
    from trencadis.engine.inspect.accounting import SubmittedStep

__all__ = ["NO_SWAPS", "SwapCounts", "Swapping", "num_host_blocks"]


@attrs.frozen(kw_only=True)
class SwapCounts:
    """What one plan swapped.

    Attributes:
        num_blocks_out: Blocks copied to host memory.
        num_blocks_in: Blocks copied back.
        num_fallbacks: Preempted sequences that host memory had no room for: they are recomputed.
    """

    num_blocks_out: int = 0
    num_blocks_in: int = 0
    num_fallbacks: int = 0


NO_SWAPS = SwapCounts()
"""Of a plan that swaps nothing."""


@attrs.frozen(eq=False)
class _Copy:
    """Blocks of one sequence that are to be copied, in table order."""

    sequence: Sequence
    device: Int32Array
    host: Int32Array


class Swapping(Stage, Restorable):
    """The host blocks of one engine, and the copies of the plan in the making.

    Args:
        num_host_blocks: Host blocks 0 .. num_host_blocks - 1; 0: every preempted sequence is recomputed.
        copy: Copies blocks, outs first, in order with batches.
        num_partitions: Parts of the device's blocks. Each has as many host blocks, of which those of the first come first.

    Attributes:
        num_swapped: Sequences whose blocks are in host memory.
        counts: What was swapped for the plan that was flushed last.
    """

    restored = ("num_free", "num_swapped", "_num_free", "_num_fallbacks", "_stacks")

    def __init__(
        self,
        *,
        num_host_blocks: int = 0,
        copy: Callable[[BlockCopies, BlockCopies], None] | None = None,
        num_partitions: int = 1,
    ) -> None:
        self.num_host_blocks = num_host_blocks
        self.num_free = num_host_blocks
        self.num_swapped = 0
        self.counts = NO_SWAPS
        self._copy = copy
        size = self._num_per_partition = num_host_blocks // num_partitions
        # The lowest ids first, in ascending runs: neighbours are copied together.
        self._stacks: list[Int32Array] = [
            np.arange((one + 1) * size - 1, one * size - 1, -1, dtype=np.int32) for one in range(num_partitions)
        ]
        self._num_free = [size] * num_partitions
        self._outs: list[_Copy] = []
        self._ins: list[_Copy] = []
        self._num_fallbacks = 0

    @property
    def has_copies(self) -> bool:
        """True if copies are noted that were not handed over."""
        return bool(self._outs or self._ins)

    def swap_out(self, sequence: Sequence, blocks: Int32Array) -> bool:
        """Give a running sequence host blocks for what it has computed; False if there is no room, or nothing to keep.

        Args:
            sequence: It is about to lose its device blocks.
            blocks: Those that hold computed tokens, in table order.
        """
        if not self.num_host_blocks or not blocks.size:
            return False
        num_free = self._num_free[sequence.partition]
        if len(blocks) > num_free:
            self._num_fallbacks += 1
            return False
        host = np.sort(self._stacks[sequence.partition][num_free - len(blocks) : num_free])
        self._num_free[sequence.partition] -= len(host)
        self.num_free -= len(host)
        sequence.host_blocks = host
        self.num_swapped += 1
        self._outs.append(_Copy(sequence, blocks.copy(), host))
        return True

    def swap_in(self, sequence: Sequence, blocks: Int32Array, *, num_found: int) -> None:
        """Fill the new device blocks of a sequence that was swapped out; its host blocks are free after the copy.

        Args:
            sequence: It is being admitted.
            blocks: All its device blocks, in table order.
            num_found: Leading ones that the prefix cache held still.
        """
        host = self._hosted(sequence)
        missing = host[num_found:]
        self._push(host[:num_found])
        sequence.host_blocks = None
        self.num_swapped -= 1
        if missing.size:
            self._ins.append(_Copy(sequence, blocks[num_found : len(host)].copy(), missing))

    def forget(self, sequence: Sequence) -> None:
        """Free the host blocks of a sequence, if it has any, and make no copy for it that was not handed over."""
        if sequence.host_blocks is not None:
            self._push(sequence.host_blocks)
            sequence.host_blocks = None
            self.num_swapped -= 1
        if self.has_copies:
            self._push(*(copy.host for copy in self._ins if copy.sequence is sequence))
            self._outs = [copy for copy in self._outs if copy.sequence is not sequence]
            self._ins = [copy for copy in self._ins if copy.sequence is not sequence]

    def after_build(self, step: SubmittedStep, batch: Batch) -> None:
        """Hand the copies of the plan to the executor, and note their counts."""
        self.flush()
        step.swap_counts = self.counts

    def flush(self) -> None:
        """Hand the copies of a plan to the executor; called once for each batch, right before it is submitted.

        Raises:
            Exception: Whatever the executor raises; the sequences of the plan must then be recomputed.
        """
        if not (self._outs or self._ins or self._num_fallbacks):
            self.counts = NO_SWAPS
            return
        outs, self._outs = self._outs, []
        ins, self._ins = self._ins, []
        copies = _joined(outs, outwards=True), _joined(ins, outwards=False)
        self.counts = SwapCounts(
            num_blocks_out=len(copies[0]), num_blocks_in=len(copies[1]), num_fallbacks=self._num_fallbacks
        )
        self._num_fallbacks = 0
        if not (outs or ins):
            return
        self._push(*(copy.host for copy in ins))
        if self._copy is None:
            raise InternalError("blocks are swapped out, but no copy is submitted")
        self._copy(*copies)

    def inspect(self) -> HostBlockSnapshot:
        """Return a copy of what is kept here, for tests and debuggers."""
        return HostBlockSnapshot(
            num_blocks=self.num_host_blocks,
            num_swapped=self.num_swapped,
            free=tuple(
                block
                for stack, num_free in zip(self._stacks, self._num_free, strict=True)
                for block in stack[:num_free].tolist()
            ),
            copied_in=tuple(block for copy in self._ins for block in copy.host.tolist()),
        )

    @staticmethod
    def _hosted(sequence: Sequence) -> Int32Array:
        if sequence.host_blocks is None:
            raise InternalError(f"slot {sequence.slot} has no blocks in host memory")
        return sequence.host_blocks

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


def num_host_blocks(
    config: Config,
    model: ModelFacts,
    executor: Executor,
    *,
    block_size: int,
    max_model_len: int,
    num_partitions: int = 1,
) -> int:
    """Return how many host blocks the config pays for, as many in each partition; 0 if preempted sequences are recomputed.

    Raises:
        ConfigValueError: Blocks are to be swapped, but backend or executor cannot, or there is no memory for one block.
    """
    if config.engine.preemption != "swap":
        return 0
    if not executor.capabilities.swaps_blocks or not isinstance(executor, SupportsSwapping):
        who = "executor" if executor.capabilities.swaps_blocks else "backend"
        raise ConfigValueError(
            f'[engine] preemption = "swap": the {who} "{getattr(config, who).name}" cannot copy KV blocks to host memory.',
            hint=f'Set it to "recompute", or choose another {who}.',
        )
    block_bytes = max(1, model.kv_bytes_per_token * block_size)
    count = config.cache.swap_bytes // block_bytes // num_partitions * num_partitions
    if not count:
        raise ConfigValueError(
            f'[cache] swap_bytes = {config.cache.swap_bytes}: with [engine] preemption = "swap" it must hold at least one '
            f"KV block of {block_bytes} bytes{' for each rank' if num_partitions > 1 else ''}.",
            hint='Raise it, to several GiB of host memory if there are, or set engine.preemption to "recompute".',
        )
    # As many as every running sequence at full length holds: who is swapped out was running.
    return int(min(count, config.engine.max_num_seqs * -(-max_model_len // block_size)))
