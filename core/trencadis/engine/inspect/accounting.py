"""What a step cost and did: cumulative totals, and the statistics that observers see."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

import attrs

from trencadis.engine.inspect.metrics_page import MetricsPage
from trencadis.engine.inspect.observers import Observers
from trencadis.engine.inspect.off import off_metrics
from trencadis.engine.scheduling.scheduler import Scheduler
from trencadis.engine.stage import Stage
from trencadis.engine.state import EngineState
from trencadis.engine.step import SubmittedStep
from trencadis.faults import FaultLog, as_words, reraise_interrupt
from trencadis.interfaces import Executor
from trencadis.records import (
    EngineGauges,
    EngineTotals,
    FinishedSequence,
    Plan,
    StepOutput,
    StepStats,
    TokenDeltas,
)
from trencadis.thread_watch import ENGINE_THREADS, ThreadWatch

__all__ = ["Accounting"]


logger = logging.getLogger("trencadis.engine")

_NO_COUNTERS = '# The engine counts nothing here: no observer shows metrics. Set observer.names to ["prometheus"].\n'

_LATEST = frozenset(field.name for field in attrs.fields(EngineTotals) if field.metadata.get("is_latest"))
"""Totals that are the latest value of a step, which is a total itself."""


class Accounting:
    """Counts committed steps of one engine and shows them to its observers.

    Args:
        state: The engine's state, read only.
        observers: Who watches.
        label: Names executor and backend in messages.

    Attributes:
        totals: Counters since the start.
        label: The argument.
    """

    def __init__(self, state: EngineState, observers: Observers, *, label: str = "the executor") -> None:
        self.totals = EngineTotals()
        self.label = label
        self._state = state
        self._observers = observers
        self._faults = FaultLog(logger)
        self._threads = ThreadWatch(logger, "The engine's process")

    def planned(self, plan: Plan, scheduler: Scheduler) -> SubmittedStep:
        """Return a step with the counts of its plan."""
        policy, admission = scheduler.policy, scheduler.admission
        step = SubmittedStep(
            plan=plan,
            num_prompt_tokens_admitted=admission.num_prompt_tokens,
            num_prompt_tokens_cached=admission.num_cached_tokens,
            num_recomputed_tokens=scheduler.num_recomputed_tokens,
            policy=policy.name,
            num_quarantined=policy.num_quarantined,
        )
        if policy.beside is not None:
            step.stats.update(policy.beside.take_step())
        return step

    def committed(self, step: SubmittedStep, output: StepOutput, deltas: TokenDeltas) -> None:
        """Count one step."""
        totals, plan, passes = self.totals, step.plan, step.pass_counts
        num_brought = step.num_brought
        totals.num_steps += 1
        totals.num_sequence_steps += len(deltas.slots) + num_brought
        totals.num_scheduled_tokens += plan.num_tokens
        totals.num_padded_tokens += output.num_padded_tokens
        totals.num_compilations += output.num_compilations
        totals.num_bucket_hits += passes.num_hits
        totals.num_fallbacks += passes.num_fallbacks
        totals.num_substituted += passes.num_substituted
        totals.num_unprepared += passes.num_unprepared
        totals.num_emitted_tokens += len(deltas.token_ids) + num_brought
        totals.num_preempted += len(plan.preempted)
        totals.num_prompt_tokens_admitted += step.num_prompt_tokens_admitted
        totals.num_prompt_tokens_cached += step.num_prompt_tokens_cached
        totals.num_recomputed_tokens += step.num_recomputed_tokens
        for name, value in step.stats.items():
            if hasattr(totals, name):
                setattr(totals, name, value if name in _LATEST else _added(getattr(totals, name), value))
        totals.plan_s += step.plan_s
        totals.commit_s += step.commit_s
        totals.device_s += output.device_s
        if self._observers.watched:
            self._observers.on_step(self._stats(step, output, deltas, num_brought))
            totals.num_observer_failures = self._observers.num_failures

    @property
    def is_watched(self) -> bool:
        """Whether an observer is shown each step."""
        return bool(self._observers.watched)

    def finished(self, finished: FinishedSequence) -> None:
        """Count a sequence that left."""
        self.totals.num_finished += 1
        if self._observers.watched:
            self._observers.on_request(finished)

    def metrics(self, stages: Iterable[Stage], executor: Executor) -> str:
        """Return what observers, stages and executor measured, in Prometheus' text format; a comment says so if no observer counts."""
        page = MetricsPage(self._faults)
        self._observers.add_metrics(page, self.gauges())
        comment = "" if page.text else _NO_COUNTERS
        page.add("the engine", off_metrics() + ENGINE_THREADS.format(self._threads.look()))
        for stage in stages:
            for owner, text in stage.metrics().items():
                page.add(owner, text)
        try:
            page.add(self.label, executor.metrics())
        except BaseException as error:
            reraise_interrupt(error)
            said = f"{self.label} raised {as_words(error)} in metrics(); they are left out."
            self._faults.say(f"{self.label}.metrics", said, error=error)
        return comment + page.text

    def close(self) -> None:
        """Close the observers."""
        self._observers.close()

    def gauges(self) -> EngineGauges:
        """Return what the engine holds now."""
        state = self._state
        return EngineGauges(
            num_running=len(state.running),
            num_waiting=state.num_waiting,
            num_free_blocks=state.blocks.num_free,
            num_cached_blocks=state.blocks.num_cached,
            num_used_blocks=state.blocks.num_used,
            **state.gauges,
        )

    def _stats(self, step: SubmittedStep, output: StepOutput, deltas: TokenDeltas, num_brought: int) -> StepStats:
        state, plan = self._state, step.plan
        return StepStats(
            step=plan.step,
            now_s=state.clock.now_s(),
            num_running=len(state.running),
            num_waiting=state.num_waiting,
            num_sequences=plan.num_sequences,
            num_scheduled_tokens=plan.num_tokens,
            num_padded_tokens=output.num_padded_tokens,
            num_emitted_tokens=len(deltas.token_ids) + num_brought,
            num_admitted=len(plan.admitted),
            num_preempted=len(plan.preempted),
            num_finished=len(deltas.finished),
            num_prompt_tokens_cached=step.num_prompt_tokens_cached,
            num_prompt_tokens_admitted=step.num_prompt_tokens_admitted,
            num_recomputed_tokens=step.num_recomputed_tokens,
            num_free_blocks=state.blocks.num_free,
            num_cached_blocks=state.blocks.num_cached,
            num_used_blocks=state.blocks.num_used,
            start_s=step.start_s,
            plan_s=step.plan_s,
            device_s=output.device_s,
            commit_s=step.commit_s,
            passes=step.passes,
            num_compilations=output.num_compilations,
            policy=step.policy,
            num_quarantined=step.num_quarantined,
            num_bucket_hits=step.pass_counts.num_hits,
            num_fallbacks=step.pass_counts.num_fallbacks,
            num_substituted=step.pass_counts.num_substituted,
            num_unprepared=step.pass_counts.num_unprepared,
            **state.gauges,
            **step.stats,
        )


def _added(one: Any, other: Any) -> Any:
    """Return the sum of two numbers, or of two tuples place by place, either of which may be longer. Pure."""
    if isinstance(one, tuple):
        return tuple(a + b for a, b in zip_longest(one, other, fillvalue=0))
    return one + other
