"""An executor without a device: steps take the time that a model of step times says, texts have the lengths of the workload."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from trencadis.clock import SimulatedClock
from trencadis.interfaces import (
    AllocationPlan,
    Backend,
    BackendCapabilities,
    BlockCopies,
    Executor,
    PendingStep,
    Sampler,
)
from trencadis.records import (
    Batch,
    BoolArray,
    Bucket,
    Int32Array,
    Int64Array,
    MemoryReport,
    ModelFacts,
    ModelSource,
    Pass,
    StepOutput,
)
from trencadis_tools.simulation.step_shape import StepShape, StepTimes

__all__ = ["EOS", "SimulatedExecutor"]

EOS = 0
"""The token that ends a simulated text."""

_KV_BYTES_PER_TOKEN = 131_072
_COPIED_BYTES_PER_S = 20e9
"""Between device and pinned host memory. Source: PCIe 4.0 x16, about two thirds of its 31.5 GB/s; the KV is that of Llama 3.1 8B."""


class SimulatedExecutor(Executor):
    """Runs batches one after the other on a simulated device; only here the true lengths of texts are known.

    A request's ``SamplingParams.seed`` is its index in the workload: so a row is recognised whatever policy admitted it. Its text is the
    token ``index + 2``, over and over, and :data:`EOS`.

    Args:
        clock: Moves on when a step is waited for.
        step_times: How long steps take.
        output_lens: True output tokens of each request of the workload.
        max_model_len: Longest sequence, tokens.
        vocab_size: Tokens that prompts are made of; 0: :data:`EOS` and one for each request beyond token 1.
        block_size: Tokens per block, if the config names no size.
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
    ) -> None:
        self._clock = clock
        self._step_times = step_times
        self._output_lens = output_lens
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size or len(output_lens) + 2
        self._capabilities = BackendCapabilities(layout="ragged", default_block_size=block_size, swaps_blocks=True)
        self._last_position: Int64Array = np.empty(0, np.int64)
        self._num_prompt_tokens: Int64Array = self._last_position
        self._text: Int32Array = np.empty(0, np.int32)
        self._free_s = 0.0

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
            kv_bytes_per_token=_KV_BYTES_PER_TOKEN,
        )

    @property
    def capabilities(self) -> BackendCapabilities:
        """Ragged: nothing is padded."""
        return self._capabilities

    def memory(self, *, max_num_batched_tokens: int, max_num_seqs: int) -> MemoryReport:
        """Return what the longest sequence takes: workloads name the number of blocks."""
        longest = self._max_model_len * _KV_BYTES_PER_TOKEN
        return MemoryReport(total_bytes=longest, free_bytes=longest, activation_bytes=0)

    def allocate(self, plan: AllocationPlan) -> None:
        """Make places for what is known of each row."""
        self._last_position = np.zeros(plan.num_rows, np.int64)
        self._num_prompt_tokens = np.zeros(plan.num_rows, np.int64)
        self._text = np.zeros(plan.num_rows, np.int32)
        self._block_bytes = plan.block_size * _KV_BYTES_PER_TOKEN

    def prepare(self, bucket: Bucket) -> None:
        """There is nothing to compile."""

    def submit(self, batch: Batch) -> PendingStep:
        """Queue the batch after those before it; the device waits for the host where that is slower."""
        for start in batch.row_starts:
            assert start.params.seed is not None, "a simulated request has its index for a seed"
            self._num_prompt_tokens[start.row] = start.num_prompt_tokens
            self._last_position[start.row] = start.num_prompt_tokens + self._output_lens[start.params.seed] - 1
            self._text[start.row] = start.params.seed + 2
        shape = self._shape(batch)
        num_tokens = shape.num_decode_tokens + shape.num_prefill_tokens
        step_s = self._step_times.device_s(shape) if num_tokens else 0.0
        host_s = self._step_times.host_s(shape) if num_tokens else 0.0
        self._free_s = max(self._free_s, self._clock.now_s() + host_s) + step_s
        return _Step(self._clock, self._free_s, self._output(batch, num_tokens, step_s))

    def swap_blocks(self, *, outs: BlockCopies, ins: BlockCopies) -> None:
        """Keep the device busy for as long as the copies take."""
        copied_s = (len(outs) + len(ins)) * self._block_bytes / _COPIED_BYTES_PER_S
        self._free_s = max(self._free_s, self._clock.now_s()) + copied_s

    def close(self) -> None:
        """There is nothing to close."""

    def _shape(self, batch: Batch) -> StepShape:
        if len(batch.passes) == 1 and not batch.row_starts:
            one = batch.passes[0]
            if self._decodes(one).all():
                number = len(one.rows)
                return StepShape(
                    num_decodes=number, num_decode_tokens=number, num_decode_context=int(one.starts.sum()) + number
                )
        sizes = np.zeros(7)
        for one in batch.passes:
            decodes = self._decodes(one)
            query, ends = one.query_lens, one.starts + one.query_lens
            prefills = ~decodes
            num_decodes = int(decodes.sum())
            products = query[prefills] * (one.starts[prefills] + (query[prefills] + 1) / 2)
            sizes += (
                num_decodes,
                len(query) - num_decodes,
                query[decodes].sum(),
                query[prefills].sum(),
                ends[decodes].sum(),
                ends[prefills].sum(),
                products.sum(),
            )
        return StepShape(
            num_decodes=int(sizes[0]),
            num_prefills=int(sizes[1]),
            num_decode_tokens=int(sizes[2]),
            num_prefill_tokens=int(sizes[3]),
            num_decode_context=int(sizes[4]),
            num_prefill_context=int(sizes[5]),
            prefill_products=float(sizes[6]),
            num_new=len(batch.row_starts),
        )

    def _decodes(self, one: Pass) -> BoolArray:
        """Return which sequences of a pass compute one token beyond their prompts."""
        decodes: BoolArray = (one.query_lens == 1) & (one.starts >= self._num_prompt_tokens[one.rows])
        return decodes

    def _output(self, batch: Batch, num_tokens: int, step_s: float) -> StepOutput:
        num_emitted: Int32Array = np.zeros(batch.num_sequences, np.int32)
        token_ids: Int32Array = np.zeros(batch.num_sequences, np.int32)
        for one in batch.passes:
            num_emitted[one.indices] = one.num_logits
            ends = one.starts + one.query_lens == self._last_position[one.rows]
            token_ids[one.indices] = self._text[one.rows]
            token_ids[one.indices[ends]] = EOS
        return StepOutput(
            token_ids=token_ids[num_emitted > 0],
            num_emitted=num_emitted,
            num_padded_tokens=num_tokens,
            device_s=step_s,
            step=batch.step,
        )


class _Step:
    """A step that ends at a known time."""

    def __init__(self, clock: SimulatedClock, end_s: float, output: StepOutput) -> None:
        self._clock = clock
        self._end_s = end_s
        self._output = output

    def wait(self) -> StepOutput:
        """Move the clock to the end of the step."""
        self._clock.advance(max(0.0, self._end_s - self._clock.now_s()))
        return self._output
