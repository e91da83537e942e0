"""A pipeline without processes: every stage has a fake model's KV cache and rows of its own, and its time is known exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from trencadis.clock import SimulatedClock
from trencadis.interfaces import AllocationPlan, BlockCopies, PendingStep
from trencadis.records import Batch, Int32Array, ModelFacts, StepOutput
from trencadis_testing.fake_executor import FakeExecutor
from trencadis_testing.fakes import FakeBackend

__all__ = ["StagedExecutor", "num_tokens_of"]

_FORGOTTEN = -2
"""In place of a token that a stage has not sampled: no text goes on with it."""


def num_tokens_of(batch: Batch) -> int:
    """Return how many tokens a batch computes. Pure."""
    return sum(int(one.query_lens.sum()) for one in batch.passes)


@attrs.define(kw_only=True)
class StagedExecutor(FakeExecutor):
    """Stages of a pipeline.

    A stage takes a batch when the stage before is through with it and this one is through with the batch before. All but the last run a
    batch as early as may be, when it is submitted, and forget what the last one alone samples.

    Attributes:
        clock: Set to the end of a step when it is waited for.
        num_stages: How many.
        seconds: What a batch takes on each stage.
        make_backend: Makes the fake model of a stage.
        busy_s: What each stage has computed, seconds.
        spans: Begin and end on each stage, by step.
        most_in_flight: Steps that were in flight at once.
    """

    clock: SimulatedClock
    num_stages: int
    seconds: Callable[[Batch], float] = lambda batch: 1.0
    make_backend: Callable[[], FakeBackend] = FakeBackend
    busy_s: list[float] = attrs.field(init=False)
    spans: dict[int, list[tuple[float, float]]] = attrs.field(init=False, factory=dict)
    most_in_flight: int = attrs.field(init=False, default=0)
    num_in_flight: int = attrs.field(init=False, default=0)
    stages: list[FakeBackend] = attrs.field(init=False, factory=list)
    free_s: list[float] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        super().__init__(self.make_backend())
        self.busy_s, self.free_s = [0.0] * self.num_stages, [0.0] * self.num_stages

    def start(self, **options: Any) -> ModelFacts:
        facts = super().start(**options)
        self.stages = [self.make_backend() for _ in range(self.num_stages - 1)]
        return facts

    def allocate(self, plan: AllocationPlan) -> None:
        for stage in self.stages:
            stage.allocate(plan)
        super().allocate(plan)

    def submit(self, batch: Batch) -> PendingStep:
        earlier = []
        for stage in self.stages:
            step = stage.submit(batch)
            stage.run_queued()
            earlier.append(step)
            if step.error is None:
                _forget(stage, batch, step.output)
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        return _StagedStep(self, earlier, super().submit(batch), self._take_time(batch))

    def copy_blocks(self, *, sources: Int32Array, targets: Int32Array) -> None:
        for stage in self.stages:
            stage.copy_blocks(sources=sources, targets=targets)
        super().copy_blocks(sources=sources, targets=targets)

    def swap_blocks(self, *, outs: BlockCopies, ins: BlockCopies) -> None:
        for stage in self.stages:
            stage.swap_blocks(outs=outs, ins=ins)
        super().swap_blocks(outs=outs, ins=ins)

    def bubble(self, since_s: float = 0.0) -> float:
        """Return the share of their time in which stages had nothing to compute."""
        return 1.0 - sum(self.busy_s) / (self.num_stages * (self.clock.now_s() - since_s))

    def _take_time(self, batch: Batch) -> float:
        """Return when the last stage is through with a batch."""
        end_s, took_s, spans = self.clock.now_s(), self.seconds(batch), []
        for stage, free_s in enumerate(self.free_s):
            begin_s = max(end_s, free_s)
            end_s = self.free_s[stage] = begin_s + took_s
            self.busy_s[stage] += took_s
            spans.append((begin_s, end_s))
        self.spans[batch.step] = spans
        return end_s


def _forget(stage: FakeBackend, batch: Batch, output: StepOutput) -> None:
    for one in batch.passes:
        newest = one.starts + one.query_lens - one.num_logits + output.num_emitted[one.indices]
        samples = one.num_logits > 0
        stage._tokens[one.rows[samples], newest[samples]] = _FORGOTTEN


class _StagedStep:
    def __init__(self, executor: StagedExecutor, earlier: list[Any], pending: PendingStep, end_s: float) -> None:
        self._executor, self._earlier, self._pending, self._end_s = executor, earlier, pending, end_s

    def wait(self) -> StepOutput:
        executor = self._executor
        executor.num_in_flight -= 1
        executor.clock.advance(max(0.0, self._end_s - executor.clock.now_s()))
        output = self._pending.wait()
        for step in self._earlier:
            if step.error is not None:
                raise step.error
            assert step.output.token_ids.tolist() == output.token_ids.tolist(), "a stage computed another text"
        return output
