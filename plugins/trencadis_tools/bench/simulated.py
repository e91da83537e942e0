"""An executor without a device: steps take the time that a model of step times says, texts have the lengths of a trace."""

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
    Bucket,
    Int32Array,
    Int64Array,
    MemoryReport,
    ModelFacts,
    ModelSource,
    StepOutput,
    StepTime,
)

__all__ = ["EOS", "SimulatedExecutor"]

EOS = 0
"""The token that ends a simulated text."""

_TEXT = 1
_KV_BYTES_PER_TOKEN = 131_072
_COPIED_BYTES_PER_S = 20e9
"""Between device and pinned host memory. Source: PCIe 4.0 x16, about two thirds of its 31.5 GB/s; the KV is that of Llama 3.1 8B."""


class SimulatedExecutor(Executor):
    """Runs batches one after the other on a simulated device; only here the true lengths of texts are known.

    The last prompt token of request i of the workload is ``i + 2``: so a row is recognised whatever policy admitted it.

    Args:
        clock: Moves on when a step is waited for.
        step_time: How long steps take.
        output_lens: True output tokens of each request of the workload.
        max_model_len: Longest sequence, tokens.
        block_size: Tokens per block, if the config names no size.
    """

    def __init__(
        self,
        clock: SimulatedClock,
        step_time: StepTime,
        output_lens: Sequence[int],
        *,
        max_model_len: int,
        block_size: int = 16,
    ) -> None:
        self._clock = clock
        self._step_time = step_time
        self._output_lens = output_lens
        self._max_model_len = max_model_len
        self._capabilities = BackendCapabilities(layout="ragged", default_block_size=block_size, swaps_blocks=True)
        self._last_position: Int64Array = np.empty(0, np.int64)
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
            vocab_size=len(self._output_lens) + 2,
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
        """Make a place for each row's last position."""
        self._last_position = np.zeros(plan.num_rows, np.int64)
        self._block_bytes = plan.block_size * _KV_BYTES_PER_TOKEN

    def prepare(self, bucket: Bucket) -> None:
        """There is nothing to compile."""

    def submit(self, batch: Batch) -> PendingStep:
        """Queue the batch after those before it."""
        for start in batch.row_starts:
            index = int(start.token_ids[start.num_prompt_tokens - 1]) - 2
            self._last_position[start.row] = start.num_prompt_tokens + self._output_lens[index] - 1
        num_tokens = sum(int(one.query_lens.sum()) for one in batch.passes)
        num_context = sum(int(one.starts.sum()) for one in batch.passes) + num_tokens
        step_s = self._step_time.step_s(float(num_tokens), num_context) if num_tokens else 0.0
        self._free_s = max(self._free_s, self._clock.now_s()) + step_s
        return _Step(self._clock, self._free_s, self._output(batch, num_tokens, step_s))

    def swap_blocks(self, *, outs: BlockCopies, ins: BlockCopies) -> None:
        """Keep the device busy for as long as the copies take."""
        copied_s = (len(outs) + len(ins)) * self._block_bytes / _COPIED_BYTES_PER_S
        self._free_s = max(self._free_s, self._clock.now_s()) + copied_s

    def close(self) -> None:
        """There is nothing to close."""

    def _output(self, batch: Batch, num_tokens: int, step_s: float) -> StepOutput:
        num_emitted: Int32Array = np.zeros(batch.num_sequences, np.int32)
        token_ids: Int32Array = np.full(batch.num_sequences, _TEXT, np.int32)
        for one in batch.passes:
            num_emitted[one.indices] = one.num_logits
            ends = one.starts + one.query_lens == self._last_position[one.rows]
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
