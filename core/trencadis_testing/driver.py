"""Drives a backend by hand: one call is one batch. What suites use in place of an engine.

The driver keeps what an engine would: each row's known tokens, how many are computed, and its blocks. Blocks are given out in a
scattered order, so nothing works by lying in order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np

from trencadis.interfaces import BlockCopies
from trencadis.records import (
    Batch,
    Bucket,
    Drafts,
    Int32Array,
    Pass,
    Phase,
    RowStart,
    SamplingParams,
    Shape,
    StepOutput,
    TableWrites,
)
from trencadis_testing.shapes import decode_shape, prefill_shape, unified_shape_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from trencadis.interfaces import AllocationPlan, Backend, KVPool, PendingStep
from trencadis_testing.optional_calls import full_backend

__all__ = ["BackendDriver", "Work"]


@attrs.frozen
class Work:
    """What one row computes in a step.

    Attributes:
        row: Which.
        num_tokens: Known tokens to compute; 0 stands for all that are not computed yet.
        drafts: Draft tokens to verify after them.
        parents: Index of the draft before each, -1 for the newest token; empty: they are linear.
    """

    row: int
    num_tokens: int = 0
    drafts: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()


@attrs.define
class _Row:
    tokens: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    num_computed: int = 0
    num_pending: int = 0
    blocks: list[int] = attrs.field(factory=list)


@attrs.frozen
class _Submitted:
    pending: PendingStep
    rows: tuple[int, ...]


class BackendDriver:
    """Builds batches for one loaded and allocated backend.

    Args:
        backend: Driven.
        plan: Plan that the backend was allocated with.
        seed: Seed of the order in which blocks are given out.
        bucket: From the shape of a padded or unified pass to its bucket; None: exactly the shape.
    """

    def __init__(
        self,
        backend: Backend,
        plan: AllocationPlan,
        *,
        seed: int = 0,
        bucket: Callable[[Shape], Bucket] | None = None,
    ) -> None:
        self._backend = full_backend(backend)
        self._plan = plan
        self._bucket = bucket or Bucket.of
        self._free = list(range(plan.num_blocks))
        self._free_on_host = list(range(plan.num_host_blocks))
        self._on_host: dict[int, list[int]] = {}
        self._taken: dict[int, NDArray[np.uint8]] = {}
        for blocks in (self._free, self._free_on_host):
            random.Random(seed).shuffle(blocks)
        self._rows: dict[int, _Row] = {}
        self._starts: list[RowStart] = []
        self._writes: list[tuple[int, int, int]] = []
        self._steps = 0
        self._queue: list[_Submitted] = []

    def start(
        self, row: int, tokens: Sequence[int], *, params: SamplingParams | None = None, num_prompt_tokens: int = 0
    ) -> None:
        """Give a row to a sequence, with the next step; what held it before gives its blocks back.

        Args:
            row: Which.
            tokens: Known tokens.
            params: Greedy if None.
            num_prompt_tokens: How many of them are the prompt; 0: all.
        """
        if row in self._rows:
            self._free.extend(self._rows[row].blocks)
        params = params or SamplingParams(temperature=0.0)
        num_prompt_tokens = num_prompt_tokens or len(tokens)
        self._rows[row] = _Row(list(tokens), num_prompt_tokens, params)
        self._starts.append(
            RowStart(
                row=row,
                token_ids=np.array(tokens, np.int32),
                num_prompt_tokens=num_prompt_tokens,
                params=params,
                seed=17,
            )
        )

    def blocks(self, row: int) -> list[int]:
        """Return the blocks of a row, in order."""
        return list(self._rows[row].blocks)

    def move(self, row: int) -> None:
        """Copy a row's blocks to free ones and let it go on there."""
        old = self._rows[row].blocks
        new = [self._free.pop() for _ in old]
        self._backend.copy_blocks(sources=np.array(old, np.int32), targets=np.array(new, np.int32))
        self._writes.extend((row, column, block) for column, block in enumerate(new))
        self._rows[row].blocks = new
        self._free.extend(old)

    def swap(self, first: int, second: int) -> None:
        """Let two rows exchange the places of their blocks, as many as the shorter one has."""
        ours, theirs = self._rows[first].blocks, self._rows[second].blocks
        count = min(len(ours), len(theirs))
        old = [*ours[:count], *theirs[:count]]
        new = [*theirs[:count], *ours[:count]]
        self._backend.copy_blocks(sources=np.array(old, np.int32), targets=np.array(new, np.int32))
        for row, blocks in ((first, new[:count]), (second, new[count:])):
            self._writes.extend((row, column, block) for column, block in enumerate(blocks))
            self._rows[row].blocks[:count] = blocks

    def swap_out(self, *rows: int) -> None:
        """Copy the blocks of rows to host memory in one call and give them back; the rows pause."""
        self._backend.swap_blocks(outs=self._leave(*rows), ins=self._come())

    def swap_in(self, *rows: int) -> None:
        """Copy the blocks of paused rows back in one call, to whichever device blocks are free; the rows go on."""
        self._backend.swap_blocks(outs=self._leave(), ins=self._come(*rows))

    def exchange(self, *, leaves: int, comes: int) -> None:
        """Swap one row out and another one in, in one call: the second gets blocks that the first had."""
        outs = self._leave(leaves)
        self._backend.swap_blocks(outs=outs, ins=self._come(comes))

    def take_out(self, row: int, pool: KVPool) -> None:
        """Read the bytes of a row's blocks and give the blocks back; the row pauses."""
        blocks = self._rows[row].blocks
        self._taken[row] = np.empty((len(blocks), pool.layout.block_bytes), np.uint8)
        pool.read_blocks(blocks, self._taken[row])
        self._free.extend(blocks)
        self._rows[row].blocks = []

    def bring_in(self, row: int, pool: KVPool) -> None:
        """Write the bytes of a paused row to whichever blocks are free; the row goes on."""
        data = self._taken.pop(row)
        blocks = [self._free.pop(0) for _ in data]
        pool.write_blocks(blocks, data)
        self._rows[row].blocks = blocks
        self._writes.extend((row, column, block) for column, block in enumerate(blocks))

    def _leave(self, *rows: int) -> BlockCopies:
        sources: list[int] = []
        targets: list[int] = []
        for row in rows:
            blocks = self._rows[row].blocks
            self._on_host[row] = [self._free_on_host.pop() for _ in blocks]
            sources += blocks
            targets += self._on_host[row]
            self._free.extend(blocks)
            self._rows[row].blocks = []
        return BlockCopies(sources=np.array(sources, np.int32), targets=np.array(targets, np.int32))

    def _come(self, *rows: int) -> BlockCopies:
        sources: list[int] = []
        targets: list[int] = []
        for row in rows:
            hosted = self._on_host.pop(row)
            blocks = [self._free.pop() for _ in hosted]
            sources += hosted
            targets += blocks
            self._free_on_host.extend(hosted)
            self._rows[row].blocks = blocks
            self._writes.extend((row, column, block) for column, block in enumerate(blocks))
        return BlockCopies(sources=np.array(sources, np.int32), targets=np.array(targets, np.int32))

    def step(self, works: Sequence[Work]) -> StepOutput:
        """Run one step and take its tokens."""
        self.submit(works)
        return self.wait()

    def submit(self, works: Sequence[Work]) -> None:
        """Submit one step; a row that emits in a step not waited for has one token the driver does not know yet."""
        num_sequences = len(works)
        lengths, starts, samples = np.zeros((3, num_sequences), np.int32)
        for i, work in enumerate(works):
            row = self._rows[work.row]
            starts[i] = row.num_computed
            known = len(row.tokens) + row.num_pending - row.num_computed
            lengths[i] = (work.num_tokens or known) + len(work.drafts)
            samples[i] = (work.num_tokens or known) == known
            self._grow(work.row, int(starts[i] + lengths[i]))
            row.num_computed += int(lengths[i])
            row.num_pending += int(samples[i])
        drafts = self._drafts(works)
        batch = Batch(
            step=self._steps,
            num_sequences=num_sequences,
            row_starts=tuple(self._starts),
            table_writes=self._table_writes(),
            passes=self._passes(works, starts, lengths, samples),
            drafts=drafts,
        )
        self._steps += 1
        self._starts, self._writes = [], []
        self._queue.append(_Submitted(self._backend.submit(batch), tuple(work.row for work in works)))

    def wait(self) -> StepOutput:
        """Wait for the oldest step and take its tokens; drafts that did not stand are computed no more."""
        submitted = self._queue.pop(0)
        output = submitted.pending.wait()
        first = 0
        for row_index, count in zip(submitted.rows, output.num_emitted.tolist(), strict=True):
            row = self._rows[row_index]
            if not count:
                continue
            row.tokens.extend(output.token_ids[first : first + count].tolist())
            row.num_pending -= 1
            row.num_computed = min(row.num_computed, len(row.tokens) - 1 + row.num_pending)
            first += count
        return output

    def tokens(self, row: int) -> list[int]:
        """Return the known tokens of a row."""
        return list(self._rows[row].tokens)

    def output(self, row: int) -> list[int]:
        """Return the tokens a row was emitted."""
        return self._rows[row].tokens[self._rows[row].num_prompt_tokens :]

    def generate(
        self, prompts: Mapping[int, Sequence[int]], num_tokens: int, *, chunk: int = 0
    ) -> dict[int, list[int]]:
        """Run prompts by row until each emitted ``num_tokens``; return what was emitted.

        Args:
            prompts: Tokens by row.
            num_tokens: Number of tokens of each.
            chunk: Most tokens of a row in a step; 0: no limit.
        """
        for row, tokens in prompts.items():
            self.start(row, tokens)
        while any(len(self.output(row)) < num_tokens for row in prompts):
            works = []
            for row in prompts:
                left = len(self.tokens(row)) - self._rows[row].num_computed
                if len(self.output(row)) < num_tokens:
                    works.append(Work(row, min(left, chunk or left)))
            self.step(works)
        return {row: self.output(row) for row in prompts}

    # ------------------------------------------------------------------------------------------------- innards

    def _grow(self, row_index: int, num_tokens: int) -> None:
        row = self._rows[row_index]
        while len(row.blocks) * self._plan.block_size < num_tokens:
            block = self._free.pop()
            self._writes.append((row_index, len(row.blocks), block))
            row.blocks.append(block)

    def _table_writes(self) -> TableWrites:
        columns = np.array(self._writes, np.int32).reshape(-1, 3)
        return TableWrites(rows=columns[:, 0].copy(), columns=columns[:, 1].copy(), block_ids=columns[:, 2].copy())

    @staticmethod
    def _drafts(works: Sequence[Work]) -> Drafts | None:
        if not any(work.drafts for work in works):
            return None
        parents = [parent for work in works for parent in (work.parents or range(-1, len(work.drafts) - 1))]
        return Drafts(
            num_drafts=np.array([len(work.drafts) for work in works], np.int32),
            token_ids=np.array([token for work in works for token in work.drafts], np.int32),
            parents=np.array(parents, np.int32) if any(work.parents for work in works) else None,
        )

    def _passes(
        self, works: Sequence[Work], starts: Int32Array, lengths: Int32Array, samples: Int32Array
    ) -> tuple[Pass, ...]:
        capabilities = self._backend.capabilities
        num_drafts = np.array([len(work.drafts) for work in works], np.int32)
        everything = np.arange(len(works), dtype=np.int32)
        is_prefill = lengths > 1 + num_drafts
        if not len(works):
            return ()
        if capabilities.layout in {"ragged", "unified"}:
            phase = Phase.PREFILL if is_prefill.any() else Phase.DECODE
            return (self._pass(works, everything, starts, lengths, samples, phase),)
        size = capabilities.max_prefill_batch_size or len(works)
        prefills, decodes = everything[is_prefill], everything[~is_prefill]
        groups = [(prefills[i : i + size], Phase.PREFILL) for i in range(0, len(prefills), size)]
        if len(decodes):
            groups.append((decodes, Phase.DECODE))
        return tuple(self._pass(works, group, starts, lengths, samples, phase) for group, phase in groups)

    def _pass(
        self,
        works: Sequence[Work],
        indices: Int32Array,
        starts: Int32Array,
        lengths: Int32Array,
        samples: Int32Array,
        phase: Phase,
    ) -> Pass:
        chosen = [works[i] for i in indices.tolist()]
        extra = np.array([len(work.drafts) for work in chosen], np.int32)
        tables = [self._rows[work.row].blocks for work in chosen]
        shape = self._shape(starts[indices].tolist(), lengths[indices].tolist(), tables, phase)
        return Pass(
            bucket=self._bucket(shape),
            indices=indices,
            rows=np.array([work.row for work in chosen], np.int32),
            starts=starts[indices],
            query_lens=lengths[indices],
            num_logits=samples[indices] * (1 + extra),
            num_prompt_logits=np.array(
                [
                    self._prompt_logits(work.row, int(starts[i]), int(lengths[i]))
                    for work, i in zip(chosen, indices.tolist(), strict=True)
                ],
                np.int32,
            ),
        )

    def _shape(self, starts: list[int], lengths: list[int], tables: list[list[int]], phase: Phase) -> Shape:
        capabilities, size = self._backend.capabilities, self._plan.block_size
        if capabilities.layout == "unified":
            return unified_shape_of(starts, lengths, tables, block_size=size)
        if phase is Phase.PREFILL:
            return prefill_shape(starts, lengths, block_size=size, merged=capabilities.merges_prefills)
        return decode_shape(starts, lengths, tables, block_size=size, contiguous=capabilities.contiguous)

    def _prompt_logits(self, row_index: int, start: int, length: int) -> int:
        row = self._rows[row_index]
        if row.params.prompt_logprobs is None:
            return 0
        return max(0, min(length, row.num_prompt_tokens - 1 - start))
