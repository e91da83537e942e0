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
from trencadis.records.flight_record import FlightRecord, RecordedCommit, int32s
from trencadis_tools.replay.stand_ins import EOS, StandIns

__all__ = ["PlannedStep", "ReplayExecutor"]


@attrs.frozen(eq=False)
class PlannedStep:
    """What a device has to know of one step, by place in the plan.

    Attributes:
        step: Its number.
        numbers: Of the requests.
        known: Tokens of each that are known when it is done, before new ones; int32.
        yields: Whether it yields a token.
        num_drafts: That each verifies; empty: of a step that was in flight when the record begins.
    """

    step: int
    numbers: tuple[int, ...]
    known: Int32Array
    yields: Int32Array
    num_drafts: Int32Array = attrs.field(factory=lambda: np.empty(0, np.int32))


class ReplayExecutor(Executor):
    """Stands for the recorded device.

    Args:
        record: Whose capabilities and model it has.
        stand_ins: The requests.

    Attributes:
        number_of_row: Request that holds a row.
    """

    def __init__(self, record: FlightRecord, stand_ins: StandIns) -> None:
        self._record = record
        self._stand_ins = stand_ins
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in record.capabilities.items()
        }
        given["provides"] = frozenset(given["provides"])
        self._capabilities = BackendCapabilities(**given)
        self.number_of_row: dict[int, int] = {}

    @abstractmethod
    def pending(self, planned: PlannedStep, batch: Batch | None) -> PendingStep:
        """Return what waits for a step, and move the clock to where planning goes on.

        Args:
            planned: The step.
            batch: Its batch; None: it was in flight when the record begins.
        """

    def start(
        self,
        *,
        make_backend: Callable[[int], Backend],
        make_sampler: Callable[[int], Sampler],
        source: ModelSource,
    ) -> ModelFacts:
        """Return the facts of the recorded model, with tokens of the replay; makes neither backend nor sampler."""
        facts = self._record.model | {
            "vocab_size": self._stand_ins.vocab_size,
            "eos_token_ids": (EOS,),
            "max_model_len": self._record.max_model_len,
        }
        return ModelFacts(**facts)

    @property
    def capabilities(self) -> BackendCapabilities:
        """As recorded."""
        return self._capabilities

    def memory(self, *, max_num_batched_tokens: int, max_num_seqs: int) -> MemoryReport:
        """Return a report of nothing: the record says how many blocks there were."""
        return MemoryReport(total_bytes=0, free_bytes=0, activation_bytes=0)

    def allocate(self, plan: AllocationPlan) -> None:
        """There is nothing to allocate."""

    def prepare(self, bucket: Bucket) -> None:
        """There is nothing to compile."""

    def submit(self, batch: Batch) -> PendingStep:
        """Note who takes rows, and what the step computes."""
        for start in batch.row_starts:
            self.number_of_row[start.row] = self._stand_ins.number_of(start.params)
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
            planned: The step.
            commit: What was recorded of it; None: nothing was, and each sequence that yields gets one token.
            num_accepted: Drafts that stand beside this token.
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
            for token in self._stand_ins.next_tokens(number, known, count)
        ]
        return StepOutput(
            token_ids=np.array(tokens, np.int32),
            num_emitted=counts,
            device_s=0.0 if commit is None else commit.device_s,
            row_errors=errors,
            step=planned.step,
        )

    def _error(self, planned: PlannedStep, index: int) -> RowError:
        recorded = self._stand_ins.recorded[planned.numbers[index]]
        return RowError(index=index, message="as recorded", is_invalid=recorded.finish_reason == "invalid")

    def copy_blocks(self, *, sources: Int32Array, targets: Int32Array) -> None:
        """There is nothing to copy."""

    def swap_blocks(self, *, outs: BlockCopies, ins: BlockCopies) -> None:
        """There is nothing to copy."""

    def restart(self) -> None:
        """There are no ranks to start again."""

    def close(self) -> None:
        """There is nothing to close."""
