"""An executor without a device that returns recorded outputs at recorded times."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np

from trencadis.interfaces import (
    AllocationPlan,
    Backend,
    BackendCapabilities,
    BlockCopies,
    Executor,
    PendingStep,
    Sampler,
)
from trencadis.records import Batch, Bucket, Int32Array, MemoryReport, ModelFacts, ModelSource, RowError, StepOutput
from trencadis_tools.recorder.flight_record import FlightRecord, RecordedCommit, int32s
from trencadis_tools.replay.synthetic_requests import EOS, SyntheticRequests

__all__ = ["PlannedStep", "ReplayExecutor"]


@attrs.frozen(eq=False)
class PlannedStep:
    """Facts of one step that a device needs, in the order of the plan.

    Attributes:
        step: Number of the step.
        numbers: Numbers of the requests, ``[n]``.
        known: Tokens of each request known after the step, without new ones, int32 ``[n]``.
        yields: Whether each request yields a token, int32 ``[n]``.
        num_drafts: Drafts that each request verifies, int32 ``[n]``; empty for a step in flight when the record begins.
    """

    step: int
    numbers: tuple[int, ...]
    known: Int32Array
    yields: Int32Array
    num_drafts: Int32Array = attrs.field(factory=lambda: np.empty(0, np.int32))


class ReplayExecutor(Executor):
    """Substitute of the recorded device.

    Args:
        record: Record with the device's capabilities and model.
        synthetic: Requests of the replay.

    Attributes:
        number_of_row: Number of the request in each row.
    """

    def __init__(self, record: FlightRecord, synthetic: SyntheticRequests) -> None:
        self._record = record
        self._synthetic = synthetic
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in record.capabilities.items()
        }
        given["provides"] = frozenset(given["provides"])
        self._capabilities = BackendCapabilities(**given)
        self.number_of_row: dict[int, int] = {}

    @abstractmethod
    def pending(self, planned: PlannedStep, batch: Batch | None) -> PendingStep:
        """Return a pending step, and set the clock to the time at which planning continues.

        Args:
            planned: Step to run.
            batch: Batch of the step; None: it was in flight when the record begins.
        """

    def start(
        self,
        *,
        make_backend: Callable[[int], Backend],
        make_sampler: Callable[[int], Sampler],
        source: ModelSource,
    ) -> ModelFacts:
        """Return the facts of the recorded model with the replay's vocabulary; makes neither backend nor sampler."""
        facts = self._record.model | {
            "vocab_size": self._synthetic.vocab_size,
            "eos_token_ids": (EOS,),
            "max_model_len": self._record.max_model_len,
        }
        return ModelFacts(**facts)

    @property
    def capabilities(self) -> BackendCapabilities:
        """Recorded capabilities."""
        return self._capabilities

    def memory(self, *, max_num_batched_tokens: int, max_num_seqs: int) -> MemoryReport:
        """Return a report of zeros, since the record has the number of blocks."""
        return MemoryReport(total_bytes=0, free_bytes=0, activation_bytes=0)

    def allocate(self, plan: AllocationPlan) -> None:
        """Do nothing: the replay has no memory."""

    def prepare(self, bucket: Bucket) -> None:
        """Do nothing: the replay compiles nothing."""

    def submit(self, batch: Batch) -> PendingStep:
        """Record which requests hold rows, and submit the step."""
        for start in batch.row_starts:
            self.number_of_row[start.row] = self._synthetic.number_of(start.params)
        rows: Int32Array = np.full(batch.num_sequences, -1, np.int32)
        known: Int32Array = np.zeros(batch.num_sequences, np.int32)
        yields: Int32Array = np.zeros(batch.num_sequences, np.int32)
        num_drafts = yields.copy() if batch.drafts is None else batch.drafts.num_drafts
        for one in batch.passes:
            rows[one.indices] = one.rows
            known[one.indices] = one.starts + one.query_lens - num_drafts[one.indices]
            yields[one.indices] = one.num_logits > 0
        numbers = tuple(self.number_of_row[row] for row in rows.tolist())
        return self.pending(PlannedStep(batch.step, numbers, known, yields, num_drafts), batch)

    def output(
        self, planned: PlannedStep, commit: RecordedCommit | None = None, *, num_accepted: Int32Array | int = 0
    ) -> StepOutput:
        """Return the output of a step.

        Args:
            planned: Step that ends.
            commit: Recorded commit; None: each sequence that yields gets one token.
            num_accepted: Accepted drafts in addition to this token, of each sequence.
        """
        counts = planned.yields + num_accepted
        errors: tuple[RowError, ...] = ()
        if commit is not None:
            if commit.num_emitted:
                counts = int32s(commit.num_emitted).copy()
            errors = tuple(self._error(planned, index) for index in commit.errors if index < len(counts))
            counts[[one.index for one in errors]] = 0
        tokens = [
            token
            for number, known, count in zip(planned.numbers, planned.known.tolist(), counts.tolist(), strict=True)
            for token in self._synthetic.next_tokens(number, known, count)
        ]
        return StepOutput(
            token_ids=np.array(tokens, np.int32),
            num_emitted=counts,
            device_s=0.0 if commit is None else commit.device_s,
            row_errors=errors,
            step=planned.step,
        )

    def _error(self, planned: PlannedStep, index: int) -> RowError:
        recorded = self._synthetic.recorded[planned.numbers[index]]
        return RowError(index=index, message="as recorded", is_invalid=recorded.finish_reason == "invalid")

    def copy_blocks(self, *, sources: Int32Array, targets: Int32Array) -> None:
        """There is nothing to copy."""

    def swap_blocks(self, *, outs: BlockCopies, ins: BlockCopies) -> None:
        """There is nothing to copy."""

    def restart(self) -> None:
        """There are no ranks to start again."""

    def close(self) -> None:
        """There is nothing to close."""
