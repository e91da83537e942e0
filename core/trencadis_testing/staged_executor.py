"""A pipeline without processes: every stage has a fake model's KV cache and rows of its own, and its time is known exactly."""

from __future__ import annotations

from collections.abc import Callable

from trencadis.clock import SimulatedClock
from trencadis.interfaces import AllocationPlan, Backend, BlockCopies, PendingStep, Sampler
from trencadis.records import Batch, Int32Array, ModelFacts, ModelSource, StepOutput
from trencadis_testing.fake_executor import FakeExecutor
from trencadis_testing.fake_step import FakeStep
from trencadis_testing.fakes import FakeBackend

__all__ = ["StagedExecutor", "num_tokens_of"]


def num_tokens_of(batch: Batch) -> int:
    """Return how many tokens a batch computes. Pure."""
    return sum(int(one.query_lens.sum()) for one in batch.passes)


def _second(batch: Batch) -> float:
    return 1.0


class StagedExecutor(FakeExecutor):
    """Stages of a pipeline, for ``make_engine(executor=..., pipeline=..., clock=...)``.

    A stage takes a batch when the stage before is through with it and this one is through with the batch before. All but the last run a
    batch as early as may be, when it is submitted, and forget what the last one alone samples.

    Args:
        clock: The engine's; set to the end of a step when it is waited for.
        num_stages: How many.
        seconds: Time that a batch takes on each stage, in seconds.
        make_backend: Makes the fake model of a stage.

    Attributes:
        stages: The fake models of all stages but the last.
        spans: Begin and end of each step on each stage, seconds, by its number.
        most_in_flight: Steps that were in flight at once.
    """

    def __init__(
        self,
        *,
        clock: SimulatedClock,
        num_stages: int,
        seconds: Callable[[Batch], float] = _second,
        make_backend: Callable[[], FakeBackend] = FakeBackend,
    ) -> None:
        super().__init__(make_backend())
        self.stages: list[FakeBackend] = []
        self.spans: dict[int, list[tuple[float, float]]] = {}
        self.most_in_flight = 0
        self._clock = clock
        self._seconds = seconds
        self._make_stage = make_backend
        self._num_in_flight = 0
        self._busy_s = 0.0
        self._free_s = [0.0] * num_stages

    def start(
        self,
        *,
        make_backend: Callable[[int], Backend],
        make_sampler: Callable[[int], Sampler],
        source: ModelSource,
    ) -> ModelFacts:
        """Make the stages."""
        self.stages = [self._make_stage() for _ in self._free_s[1:]]
        return super().start(make_backend=make_backend, make_sampler=make_sampler, source=source)

    def allocate(self, plan: AllocationPlan) -> None:
        """Allocate on every stage."""
        for stage in self.stages:
            stage.allocate(plan)
        super().allocate(plan)

    def submit(self, batch: Batch) -> PendingStep:
        """Run the batch on all stages but the last, and queue it there."""
        earlier: list[FakeStep] = []
        for stage in self.stages:
            step = stage.submit(batch)
            stage.run_queued()
            assert isinstance(step, FakeStep)
            earlier.append(step)
            if step.output is not None:
                _forget(stage, batch, step.output)
        self._num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._num_in_flight)
        return _StagedStep(earlier, super().submit(batch), self._take_time(batch), self._ended)

    def copy_blocks(self, *, sources: Int32Array, targets: Int32Array) -> None:
        """Copy on every stage."""
        for stage in self.stages:
            stage.copy_blocks(sources=sources, targets=targets)
        super().copy_blocks(sources=sources, targets=targets)

    def swap_blocks(self, *, outs: BlockCopies, ins: BlockCopies) -> None:
        """Copy on every stage."""
        for stage in self.stages:
            stage.swap_blocks(outs=outs, ins=ins)
        super().swap_blocks(outs=outs, ins=ins)

    def bubble(self) -> float:
        """Return in which share of the time until now a stage had nothing to compute, 0 .. 1, the mean of all stages."""
        return 1.0 - self._busy_s / (len(self._free_s) * max(self._free_s))

    def _take_time(self, batch: Batch) -> float:
        """Return when the last stage is through with a batch."""
        end_s, took_s, spans = self._clock.now_s(), self._seconds(batch), []
        for stage, free_s in enumerate(self._free_s):
            begin_s = max(end_s, free_s)
            end_s = self._free_s[stage] = begin_s + took_s
            spans.append((begin_s, end_s))
        self._busy_s += took_s * len(spans)
        self.spans[batch.step] = spans
        return end_s

    def _ended(self, end_s: float) -> None:
        self._num_in_flight -= 1
        self._clock.advance(max(0.0, end_s - self._clock.now_s()))


def _forget(stage: FakeBackend, batch: Batch, output: StepOutput) -> None:
    """Let a stage lack the newest token of each sequence."""
    for one in batch.passes:
        newest = one.starts + one.query_lens - one.num_logits + output.num_emitted[one.indices]
        samples = one.num_logits > 0
        stage.forget(one.rows[samples], newest[samples])


class _StagedStep:
    def __init__(
        self, earlier: list[FakeStep], pending: PendingStep, end_s: float, ended: Callable[[float], None]
    ) -> None:
        self._earlier = earlier
        self._pending = pending
        self._end_s = end_s
        self._ended = ended

    def wait(self) -> StepOutput:
        """Let the time pass; what the stages computed must be the same text."""
        self._ended(self._end_s)
        output = self._pending.wait()
        for step in self._earlier:
            of_stage = step.wait()
            assert of_stage.token_ids.tolist() == output.token_ids.tolist(), "a stage computed another text"
        return output
