"""Strategies that an engine in another process can import by path, for tests of that process."""

from __future__ import annotations

import os
import signal

from trencadis.engine.commit.committer import Committer
from trencadis.errors import InternalError
from trencadis.interfaces import Observer, PendingStep, SchedulingPolicy
from trencadis.records import Batch, Pass, Request, StepStats
from trencadis_testing.backend import ArgmaxSampler
from trencadis_testing.fake_executor import FakeExecutor
from trencadis_testing.fakes import FakeBackend


class StepCounter(Observer):
    """Shows how many steps it saw."""

    def __init__(self) -> None:
        self.num_steps = 0

    def on_step(self, stats: StepStats) -> None:
        self.num_steps += 1

    def metrics(self) -> str:
        return f"num_steps {self.num_steps}"


class AtMostTwo(SchedulingPolicy):
    """Refuses a third request that would wait."""

    def admit(self, request: Request, *, num_waiting: int, num_waiting_tokens: int) -> str:
        return "two wait already" if num_waiting >= 2 else ""


def stopping_backend(**options: object) -> FakeBackend:
    """A backend whose process is stopped in its tenth step, as if the device had hung."""
    num_passes = 0

    def count(batch: Batch, one: Pass) -> None:
        nonlocal num_passes
        num_passes += 1
        if num_passes == 10:
            os.kill(os.getpid(), signal.SIGSTOP)

    return FakeBackend(fails=count, **options)  # type: ignore[arg-type]


class FakesSampler(ArgmaxSampler):
    """What the fake backend does by itself, log-probabilities included."""

    honours = frozenset({"greedy", "logprobs"})


def _break(*_: object) -> None:
    raise InternalError("a broken invariant of a test")


class BrokenExecutor(FakeExecutor):
    """Breaks an invariant of the engine in its fifth step: what it brings cannot be committed."""

    num_submitted = 0

    def submit(self, batch: Batch) -> PendingStep:
        self.num_submitted += 1
        if self.num_submitted == 5:
            Committer.commit = _break  # type: ignore[method-assign]
        return super().submit(batch)
