"""What a history disturbs: steps that fail, ranks that are lost, copies that fail, and components that raise or answer nonsense."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from support.core.invariants import broken_plan_rules, broken_writes
from trencadis.errors import RanksLostError
from trencadis.interfaces import AllocationPlan, BlockCopies, ConnectorPair, PendingStep
from trencadis.records import Batch, Pass, Request
from trencadis.registry import Registry
from trencadis_testing.fake_executor import FakeExecutor
from trencadis_testing.fakes import FakeBackend
from trencadis_testing.staged_executor import StagedExecutor

if TYPE_CHECKING:
    from trencadis.engine.inspect.snapshot import EngineSnapshot

__all__ = ["BREAKABLE", "Backend", "Chaos", "Inline", "ManualClock", "Staged"]

INJECTED = "injected"

BREAKABLE = {
    "scheduling": ("order", "split", "chunk", "victim", "preempt_for", "on_added", "on_finished"),
    "eviction": ("on_free", "on_hit", "victims", "forget"),
    "bucketing": ("bucket_for",),
    "speculation": ("propose", "on_verified", "on_finished"),
    "draft_length": ("choose",),
    "observer": ("on_step", "on_request"),
    "kv_connector": ("lookup", "on_allocated", "on_computed", "on_finished", "on_failed", "on_cancelled"),
}
"""Methods that may raise, by noun, while an engine runs. Each noun has a guard and, where it needs one, a fallback."""


class ManualClock:
    """A clock that moves when it is told to, and that the engine takes for a real one: nothing is awaited within a call."""

    def __init__(self) -> None:
        self._now_s = 100.0

    def now_s(self) -> float:
        """Return the time, seconds."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move the clock forward."""
        self._now_s += seconds


class Chaos:
    """Faults of one history, and what they may lead to.

    Attributes:
        faults: What was wrong with a batch, in words.
        trace: Step, rows, starts, lengths and bucket of each pass.
        blamed: Names of engine requests that were alone in a step that failed: they may end with its error.
        broke: Nouns one of whose components raised or answered nonsense, each with the method.
        preparations: Futures of the sampler that are not done.
        remote: Requests of the connector that the engine has not taken.
        remote_tokens: First tokens of such requests, as the engine gave them, each with the request's name.
        remote_ends: Their ends: name, and an error or nothing.
        wake: Tells the engine of such requests.
        engine: The engine; set before the first step.
        sizes: Its token budget and rows, for :func:`broken_plan_rules`.
        num_ranks: Ranks with sequences of their own.
        poison: Name of an engine request that fails every step that it takes part in; empty: none.
    """

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.trace: list[list[Any]] = []
        self.blamed: set[str] = set()
        self.broke: dict[str, str] = {}
        self.preparations: list[Future[Any]] = []
        self.remote: list[Request] = []
        self.remote_tokens: list[tuple[str, int]] = []
        self.remote_ends: list[tuple[str, str]] = []
        self.wake: Callable[[], None] = lambda: None
        self.poison = ""
        self.engine: Any = None
        self.sizes: dict[str, int] = {}
        self.num_ranks = 1
        self.num_failing_steps = self.num_failing_copies = self.num_losses = 0
        self._breaking: dict[str, str] = {}
        self._doomed: set[int] = set()

    # --------------------------------------------------------------------------------------------- components

    def follow(self, registry: Registry) -> None:
        """Have every component that a registry builds raise or answer nonsense when it is told to."""
        build = registry.build

        def adopting(registered: Any, config: Any, context: Any) -> Any:
            made = build(registered, config, context)
            for method in BREAKABLE.get(registered.noun, ()):
                self._adopt(registered.noun, made.scheduler if isinstance(made, ConnectorPair) else made, method)
            return made

        registry.build = adopting  # type: ignore[method-assign]

    def _adopt(self, noun: str, component: Any, name: str) -> None:
        call = getattr(component, name, None)
        if call is None:
            return

        def breaking(*args: Any, **kwargs: Any) -> Any:
            how = self._breaking.pop(noun, "")
            if not how:
                return call(*args, **kwargs)
            self.broke[noun] = name
            if how == "nonsense" and not name.startswith("on_"):
                return "nonsense"
            raise ValueError(f"{INJECTED} fault of {noun}.{name}")

        setattr(component, name, breaking)

    def break_next(self, noun: str, how: str) -> None:
        """Let the next call of a component fail, or answer nonsense; once in a history, for a fallback has no other.

        Args:
            noun: Of :data:`BREAKABLE`.
            how: ``raise`` or ``nonsense``.
        """
        if noun not in self.broke:
            self._breaking[noun] = how

    def spare(self, noun: str) -> None:
        """Let no component fail that has not failed yet."""
        self._breaking.pop(noun, None)

    def heal(self) -> None:
        """Take back everything that has not happened."""
        self.num_failing_steps = self.num_failing_copies = self.num_losses = 0
        self.poison = ""
        self._breaking.clear()
        for future in self.preparations:
            future.set_running_or_notify_cancel()
            if not future.cancelled():
                future.set_result(None)
        self.preparations.clear()

    # --------------------------------------------------------------------------------------------------- steps

    def submitted(self, batch: Batch) -> bool:
        """Check a batch, and decide what becomes of it; returns whether the ranks are lost in it."""
        now: EngineSnapshot = self.engine.inspect()
        rules = broken_plan_rules(batch, **self.sizes)
        # A bucket has room for each rank's part: the backend checks that.
        self.faults += rules if self.num_ranks == 1 else [fault for fault in rules if not fault.startswith("31")]
        self.faults += broken_writes(batch, now)
        for one in batch.passes:
            self.trace.append(
                [batch.step, one.rows.tolist(), one.starts.tolist(), one.query_lens.tolist(), str(one.bucket)]
            )
        if not batch.passes:
            return False
        names = {one.row: name for name, one in now.sequences.items()}
        taking_part = {names.get(row, "") for one in batch.passes for row in one.rows.tolist()}
        is_lost = self.num_losses > 0
        if is_lost:
            self.num_losses -= 1
        elif self.num_failing_steps > 0:
            self.num_failing_steps -= 1
            self._doomed.add(batch.step)
        elif self.poison in taking_part:
            self._doomed.add(batch.step)
        if len(taking_part) == 1 and (is_lost or batch.step in self._doomed):
            self.blamed |= taking_part
        return is_lost

    def run(self, batch: Batch, _: Pass) -> None:
        """Raise in a pass of a step that is to fail."""
        if batch.step in self._doomed:
            raise RuntimeError(f"{INJECTED} failure of a step")

    def copy(self) -> None:
        """Raise if copies to or from host memory are to fail."""
        if self.num_failing_copies > 0:
            self.num_failing_copies -= 1
            raise RuntimeError(f"{INJECTED} failure of copies")


class Backend(FakeBackend):
    """Stands for several ranks, too: a row and all its blocks are one rank's, and the bucket of a pass has room for each rank's part.

    Args:
        num_ranks: How many.
        more: See :class:`FakeBackend`.
    """

    def __init__(self, *, num_ranks: int = 1, **more: Any) -> None:
        super().__init__(**more)
        self._num_ranks = num_ranks

    def allocate(self, plan: AllocationPlan) -> None:
        """Allocate; what was queued is lost."""
        self._queue.clear()
        self._doubtful.clear()
        super().allocate(plan)
        self._sizes = np.array([plan.num_rows, plan.num_blocks, plan.num_host_blocks]) // self._num_ranks

    def submit(self, batch: Batch) -> PendingStep:
        """Check whose blocks are written."""
        writes, (rows, blocks, _) = batch.table_writes, self._sizes
        assert (writes.rows // rows == writes.block_ids // blocks).all(), "a block of another rank"
        return super().submit(batch)

    def copy_blocks(self, *, sources: Any, targets: Any) -> None:
        """Check whose blocks are copied."""
        assert (sources // self._sizes[1] == targets // self._sizes[1]).all(), "a block moves to another rank"
        super().copy_blocks(sources=sources, targets=targets)

    def swap_blocks(self, *, outs: BlockCopies, ins: BlockCopies) -> None:
        """Check whose blocks are copied."""
        _, blocks, hosted = self._sizes
        for device, host in ((outs.sources, outs.targets), (ins.targets, ins.sources)):
            assert (device // blocks == host // max(hosted, 1)).all(), "a copy of another rank's block"
        super().swap_blocks(outs=outs, ins=ins)

    def _check_bucket(self, one: Pass) -> None:
        rows, blocks, _ = self._sizes
        tables = self._tables.copy()
        for rank in range(self._num_ranks):
            is_there = one.rows // rows == rank
            if is_there.any():
                self._tables = tables - rank * blocks
                arrays = ("indices", "rows", "starts", "query_lens", "num_logits", "num_prompt_logits")
                super()._check_bucket(attrs.evolve(one, **{name: getattr(one, name)[is_there] for name in arrays}))
        self._tables = tables


class _Watched(FakeExecutor):
    """Checks every batch, and loses its ranks when it is told to."""

    chaos: Chaos

    def allocate(self, plan: AllocationPlan) -> None:
        """Allocate, and keep the plan for a restart."""
        self._plan = plan
        super().allocate(plan)

    def submit(self, batch: Batch) -> PendingStep:
        """Run the batch, unless the ranks are lost."""
        if self.chaos.submitted(batch):
            return _Lost()
        return super().submit(batch)

    def restart(self) -> None:
        """Start with an empty cache."""
        super().allocate(self._plan)


class Inline(_Watched):
    """One stage."""

    def __init__(self, chaos: Chaos) -> None:
        super().__init__()
        self.chaos = chaos


class Staged(_Watched, StagedExecutor):
    """A pipeline."""

    def __init__(self, chaos: Chaos, **more: Any) -> None:
        StagedExecutor.__init__(self, **more)
        self.chaos = chaos


class _Lost:
    def wait(self) -> Any:
        raise RanksLostError(f"The ranks were lost: {INJECTED}.")


def taken(requests: list[Request]) -> Sequence[Request]:
    """Return and forget requests."""
    found = tuple(requests)
    requests.clear()
    return found
