"""An executor without a device: step times come from a model, lengths of answers from the workload."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import Protocol

import attrs
import numpy as np

from trencadis.clock import SimulatedClock
from trencadis.interfaces import (
    AllocationPlan,
    Backend,
    BackendCapabilities,
    BlockCopies,
    Executor,
    KVWorkerSide,
    PendingStep,
    Sampler,
)
from trencadis.records import (
    Batch,
    Bucket,
    Int32Array,
    Int64Array,
    KVLayout,
    MemoryReport,
    ModelFacts,
    ModelSource,
    StepOutput,
)
from trencadis_tools.simulated_store.pool import SimulatedPool
from trencadis_tools.simulated_store.store import Stores
from trencadis_tools.simulation.drafts import Drafter
from trencadis_tools.simulation.step_shape import StepShape, StepTimes, step_shape
from trencadis_tools.simulation.step_times.linear import LinearStepTimes

__all__ = ["EOS", "SimulatedExecutor", "StepLog", "Stretch", "Timeline"]

EOS = 0
"""The token that ends a simulated text."""

KV_BYTES_PER_TOKEN = 131_072
"""KV bytes of Llama 3.1 8B, the model of the default step times."""
_COPIED_BYTES_PER_S = 20e9
"""Between device and pinned host memory. Source: PCIe 4.0 x16, about two thirds of its 31.5 GB/s."""


class StepLog(Protocol):
    """Notes the steps of one device."""

    def computed(self, shape: StepShape, ends: Sequence[tuple[float, float]]) -> None:
        """Called with some steps in order, each with one more token of every sequence.

        Args:
            shape: Sizes of the first step.
            ends: When each ends, and how long it computes, seconds.
        """
        ...


class Timeline:
    """When the steps of one device end.

    Args:
        clock: The engine's.
        step_times: How long steps take.
        log: Notes steps that are computed; or None.

    Attributes:
        free_s: When the newest step ends.
        until_s: End of a stretch of steps: those are computed that have begun by then; the engine's caller sets it.
        ended: When each of the steps ended that were waited for last, and how long it computed.
    """

    def __init__(self, clock: SimulatedClock, step_times: StepTimes, log: StepLog | None = None) -> None:
        self.free_s = 0.0
        self.until_s = math.inf
        self.ended: Sequence[tuple[float, float]] = ()
        self._clock = clock
        self._times = step_times
        self._log = log
        self._shape = StepShape()

    def begin(self, shape: StepShape, num_steps: int) -> list[tuple[float, float]]:
        """Return when each of some steps ends, each with one more token of every sequence, and how long it computes.

        Args:
            shape: Shape of the first step.
            num_steps: At least 1.
        """
        self._shape = shape
        times, free_s = self._times, max(self.free_s, self._clock.now_s())
        step_s, host_s = times.device_s(shape), times.host_s(shape)
        ends = [(free_s := free_s + host_s + step_s, step_s)]
        if num_steps > 1 and type(times) is LinearStepTimes and not times.overlap:
            growth_s = times.context_s * shape.num_decodes
            steps_s = [step_s + step * growth_s for step in range(num_steps)]
            passed_s = accumulate([free_s, *(host_s + one for one in steps_s[1:])])
            return list(zip(passed_s, steps_s, strict=True))
        for _ in range(1, num_steps):
            shape = StepShape(
                num_decodes=shape.num_decodes,
                num_decode_tokens=shape.num_decode_tokens,
                num_decode_context=shape.num_decode_context + shape.num_decodes,
            )
            step_s = times.device_s(shape)
            free_s += times.host_s(shape) + step_s
            ends.append((free_s, step_s))
        return ends

    def nothing(self) -> list[tuple[float, float]]:
        """Return the end of a step without tokens."""
        self._shape = StepShape()
        return [(max(self.free_s, self._clock.now_s()), 0.0)]

    def end(self, ends: Sequence[tuple[float, float]]) -> None:
        """Note when steps of :meth:`begin` end."""
        self.free_s = ends[-1][0]
        if self._log is not None and self._shape.num_tokens:
            self._log.computed(self._shape, ends)

    def copy(self, copied_s: float) -> None:
        """Keep the device busy with copies."""
        self.free_s = max(self.free_s, self._clock.now_s()) + copied_s

    def pass_until(self, ends: Sequence[tuple[float, float]]) -> None:
        """Move the clock to the end of the last of some steps."""
        self.ended = ends
        self._clock.advance(max(0.0, ends[-1][0] - self._clock.now_s()))


class SimulatedExecutor(Executor):
    """Runs batches one after the other on a simulated device; only here the true lengths of texts are known.

    A request's ``SamplingParams.seed`` is its index in the workload: so a row is recognised whatever policy admitted it. Its text is the
    token ``index + 2``, over and over, and :data:`EOS`.

    Where a batch may stand for several steps, it computes those that nothing changes between at once.

    Args:
        clock: Moves on when a step is waited for.
        step_times: How long steps take.
        output_lens: True output tokens of each request of the workload.
        max_model_len: Longest sequence, tokens.
        vocab_size: Tokens that prompts are made of; 0: :data:`EOS` and one for each request beyond token 1.
        block_size: Tokens per block, if the config names no size.
        layout: Layout of batches; of all but ``ragged`` steps have buckets, and each is a batch of its own.
        drafter: Says which drafts stand; None: there are none.
        kv_bytes_per_token: Size of a token's KV in the simulated model, in bytes.
        stores: Stores of the run, for KV connectors; None: of this engine alone.
        load_timeout_s: After which the engine gives a KV load up.
        log: Notes steps; or None.

    Attributes:
        max_steps: Steps that the next batch may stand for; more than 1 only if each sequence has one token in it.
        stretch: The newest batch that stands for several.
        num_submitted: Batches since the start.
    """

    def __init__(
        self,
        clock: SimulatedClock,
        step_times: StepTimes,
        output_lens: Sequence[int],
        *,
        max_model_len: int,
        vocab_size: int = 0,
        block_size: int = 16,
        layout: str = "ragged",
        drafter: Drafter | None = None,
        kv_bytes_per_token: int = KV_BYTES_PER_TOKEN,
        stores: Stores | None = None,
        load_timeout_s: float = math.inf,
        log: StepLog | None = None,
    ) -> None:
        self.timeline = Timeline(clock, step_times, log)
        self.stretch: Stretch | None = None
        self.max_steps = 1
        self.num_submitted = 0
        self._output_lens = output_lens
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size or len(output_lens) + 2
        self._drafter = drafter
        self._has_buckets = layout != "ragged"
        self._capabilities = BackendCapabilities(
            layout=layout,
            default_block_size=block_size,
            swaps_blocks=True,
        )
        self._num_prompt_tokens: Int64Array = np.empty(0, np.int64)
        self._token_bytes = kv_bytes_per_token
        self._stores = stores or Stores()
        self._load_timeout_s = load_timeout_s
        self._pool: SimulatedPool | None = None
        self._connector: KVWorkerSide | None = None
        self._newest_is_empty = self._brought_nothing = False
        self._last_position: Int64Array = np.empty(0, np.int64)
        self._text: Int32Array = np.empty(0, np.int32)

    def start(
        self,
        *,
        make_backend: Callable[[int], Backend],
        make_sampler: Callable[[int], Sampler],
        source: ModelSource,
    ) -> ModelFacts:
        """Return facts about a model that needs no files; makes neither backend nor sampler."""
        return ModelFacts(
            architecture="Simulated",
            dtype="bfloat16",
            vocab_size=self._vocab_size,
            max_model_len=self._max_model_len,
            eos_token_ids=(EOS,),
            num_parameters=0,
            weights_bytes=0,
            kv_bytes_per_token=self._token_bytes,
        )

    @property
    def capabilities(self) -> BackendCapabilities:
        """Capabilities of a device that can swap."""
        return self._capabilities

    def memory(self, *, max_num_batched_tokens: int, max_num_seqs: int) -> MemoryReport:
        """Return what the longest sequence takes: workloads name the number of blocks."""
        longest = self._max_model_len * self._token_bytes
        return MemoryReport(total_bytes=longest, free_bytes=longest, activation_bytes=0)

    def allocate(self, plan: AllocationPlan) -> None:
        """Make places for what is known of each row."""
        self._num_prompt_tokens = np.zeros(plan.num_rows, np.int64)
        self._last_position = np.zeros(plan.num_rows, np.int64)
        self._text = np.zeros(plan.num_rows, np.int32)
        self._block_bytes = plan.block_size * self._token_bytes
        self._pool = SimulatedPool(
            self._stores,
            block_size=plan.block_size,
            token_bytes=self._token_bytes,
            load_timeout_s=self._load_timeout_s,
        )
        self._connector = plan.connector
        if plan.connector is not None:
            plan.connector.register(self._pool)

    def kv_layout(self) -> KVLayout:
        """Return the layout of blocks that have a size only."""
        assert self._pool is not None, "it was allocated before"
        return self._pool.layout

    def close_connector(self) -> None:
        """Close the worker side."""
        if self._connector is not None:
            self._connector.close()

    def fail(self, now_s: float) -> None:
        """Cut the way to the KV store: what had not come there by now does not."""
        if self._pool is not None and self._pool.link is not None:
            self._pool.link.fail(now_s)

    @property
    def idle_until_s(self) -> float:
        """When the next KV transfer ends, if the newest step computes nothing and the last one brought nothing; else minus infinity."""
        link = None if self._pool is None else self._pool.link
        if link is None or not (self._newest_is_empty and self._brought_nothing):
            return -math.inf
        return link.next_report_s if link.next_report_s < math.inf else -math.inf

    def prepare(self, bucket: Bucket) -> None:
        """There is nothing to compile."""

    def submit(self, batch: Batch) -> PendingStep:
        """Queue the batch after those before it; the device waits for the host where that is slower."""
        for start in batch.row_starts:
            assert start.params.seed is not None, "a simulated request has its index for a seed"
            self._num_prompt_tokens[start.row] = start.num_prompt_tokens
            self._last_position[start.row] = start.num_prompt_tokens + self._output_lens[start.params.seed] - 1
            self._text[start.row] = start.params.seed + 2
        self.num_submitted += 1
        if self._connector is not None:
            self._connector.begin_step(batch.connector_message)
            self._connector.end_step()
            self._newest_is_empty = not batch.num_sequences
        shape = step_shape(batch.passes, num_new=len(batch.row_starts), has_buckets=self._has_buckets)
        if self.max_steps > 1 and not self._has_buckets:
            (one,) = batch.passes
            num_steps = min(self.max_steps, int((self._last_position[one.rows] - one.starts).min()) - 1)
            ends = self.timeline.begin(shape, num_steps)
            if len(ends) > 1:
                self.stretch = Stretch(self, batch, ends)
                return self.stretch
        ends = self.timeline.begin(shape, 1) if shape.num_tokens else self.timeline.nothing()
        self.timeline.end(ends)
        return _Step(self, batch, ends, self.output(batch, ends))

    def swap_blocks(self, *, outs: BlockCopies, ins: BlockCopies) -> None:
        """Keep the device busy for as long as the copies take."""
        self.timeline.copy((len(outs) + len(ins)) * self._block_bytes / _COPIED_BYTES_PER_S)

    def close(self) -> None:
        """There is nothing to close."""

    def output(self, batch: Batch, ends: Sequence[tuple[float, float]]) -> StepOutput:
        """Return what a batch gives.

        Args:
            batch: Submitted.
            ends: Ends of the steps that are computed.
        """
        num_steps = len(ends)
        num_emitted: Int32Array = np.zeros(batch.num_sequences, np.int32)
        token_ids: Int32Array = np.zeros(batch.num_sequences, np.int32)
        num_tokens = 0
        for one in batch.passes:
            num_emitted[one.indices] = one.num_logits
            last = one.starts + one.query_lens == self._last_position[one.rows]
            token_ids[one.indices] = self._text[one.rows]
            token_ids[one.indices[last]] = EOS
            num_tokens += one.bucket.num_tokens if self._has_buckets else int(one.query_lens.sum())
        emitted = token_ids[num_emitted > 0]
        if batch.drafts is not None:
            num_emitted, emitted = self._verified(batch)
        return StepOutput(
            token_ids=emitted if num_steps == 1 else np.repeat(emitted, num_steps),
            num_emitted=num_emitted if num_steps == 1 else num_emitted * np.int32(num_steps),
            num_padded_tokens=num_tokens * num_steps,
            device_s=sum(step_s for _, step_s in ends),
            step=batch.step,
        )

    def _verified(self, batch: Batch) -> tuple[Int32Array, Int32Array]:
        """Return how many tokens each sequence of a batch with drafts gets, and the tokens; those after a text's end are for nothing."""
        assert batch.drafts is not None, "only called with drafts"
        assert self._drafter is not None, "drafts are made by a simulated speculator"
        rows, ends = np.zeros(batch.num_sequences, np.int64), np.zeros(batch.num_sequences, np.int64)
        num_emitted: Int32Array = np.zeros(batch.num_sequences, np.int32)
        for one in batch.passes:
            rows[one.indices], ends[one.indices] = one.rows, one.starts + one.query_lens
            num_emitted[one.indices] = one.num_logits > 0
        ends -= batch.drafts.num_drafts  # tokens that are known, before those that come
        drafted = np.flatnonzero(batch.drafts.num_drafts)
        of = rows[drafted]
        num_emitted[drafted] += self._drafter.num_right(
            self._text[of].astype(np.int64) - 2,
            ends[drafted] - self._num_prompt_tokens[of],
            batch.drafts.num_drafts[drafted],
        )
        each = np.repeat(np.arange(batch.num_sequences), num_emitted)
        offsets = np.arange(len(each)) - np.repeat(np.cumsum(num_emitted) - num_emitted, num_emitted)
        is_last = ends[each] + offsets == self._last_position[rows[each]]
        return num_emitted, np.where(is_last, EOS, self._text[rows[each]]).astype(np.int32)

    def reported(self, batch: Batch, output: StepOutput, ends: Sequence[tuple[float, float]]) -> StepOutput:
        """Return what a batch gave, now that it has ended, with what the KV connector reports.

        Args:
            batch: Submitted.
            output: Output of that step.
            ends: Ends of the steps that were computed.
        """
        if self._connector is None or self._pool is None:
            return output
        if self._pool.cost is not None:
            num_tokens = sum(int(one.query_lens.sum()) for one in batch.passes)
            for _, step_s in ends:
                self._pool.cost.computed(num_tokens=num_tokens, seconds=step_s)
        report = self._connector.poll()
        has_report = bool(report.loaded or report.failed or report.released)
        self._brought_nothing = not (batch.num_sequences or has_report)
        return attrs.evolve(output, connector_reports={0: report}) if has_report else output


class Stretch:
    """Steps that nothing changes between, and in which no sequence ends: those that have begun by ``Timeline.until_s``."""

    def __init__(self, executor: SimulatedExecutor, batch: Batch, ends: list[tuple[float, float]]) -> None:
        self._executor = executor
        self._timeline = executor.timeline
        self._batch = batch
        self._ends = ends
        self._is_closed = False

    @property
    def num_steps(self) -> int:
        """Steps that are computed, or the most as long as it is open."""
        return len(self._ends)

    @property
    def end_s(self) -> float:
        """When the last one ends."""
        return self._ends[-1][0]

    def num_ended(self, now_s: float) -> int:
        """Return how many steps have ended. Pure."""
        return bisect_right(self._ends, now_s, key=itemgetter(0))

    def close(self) -> None:
        """Compute one step only."""
        del self._ends[1:]
        self._is_closed = True
        self._timeline.end(self._ends)

    def wait(self) -> StepOutput:
        """Move the clock to the end of the last step that is computed."""
        if not self._is_closed:
            del self._ends[bisect_left(self._ends, self._timeline.until_s, key=itemgetter(0)) + 1 :]
            self._timeline.end(self._ends)
        self._timeline.pass_until(self._ends)
        output = self._executor.output(self._batch, self._ends)
        return self._executor.reported(self._batch, output, self._ends)


class _Step:
    """A step that ends at a known time."""

    def __init__(
        self, executor: SimulatedExecutor, batch: Batch, ends: list[tuple[float, float]], output: StepOutput
    ) -> None:
        self._executor = executor
        self._batch = batch
        self._ends = ends
        self._output = output

    def wait(self) -> StepOutput:
        """Move the clock to the end of the step."""
        self._executor.timeline.pass_until(self._ends)
        return self._executor.reported(self._batch, self._output, self._ends)
