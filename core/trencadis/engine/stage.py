"""Stages: what an engine does beside planning, running and committing steps.

A stage is a part of the engine that a configuration can leave out. It acts at moments of a step, keeps its state in itself, and is called
only at the moments that it defines: what is off is not on the path of a step.

    accept ▶ added ▶ before_step ▶ claim ▶ after_plan ▶ after_build ▶ device ▶ received ▶ after_step ▶ leaving ▶ left
       └─▶ refused                                                      └───▶ failed

Stages act in one order at every moment. ``StageDefinition.before`` declares it; ``trencadis plugins`` prints it.

What a stage of another distribution raises at a moment is contained, and its answers are held to the laws beside the moments; see
:mod:`trencadis.engine.guarded_stage`. What a built-in stage raises ends the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol

import attrs

from trencadis.config import Config
from trencadis.engine.guard import Guarded
from trencadis.engine.sequences import Claim, Leaving, Sequence, When
from trencadis.engine.state import EngineState
from trencadis.engine.step import Obstacle, SchedulingChanged, SubmittedStep
from trencadis.errors import ContractError, RanksLostError
from trencadis.faults import CallMeter, shown
from trencadis.interfaces import AllocationPlan, Executor, Restorable, SamplingFingerprint, SchedulingPolicy
from trencadis.interfaces.laws import Law, law, of_type, tell, tell_always
from trencadis.records import (
    Batch,
    Bucket,
    BucketLimits,
    EngineLoad,
    EngineTotals,
    FinishedSequence,
    Int32Array,
    ModelFacts,
    ParallelLayout,
    Plan,
    Request,
    RowStart,
    SamplingParams,
    Shape,
    StepOutput,
    TokenDeltas,
    WarmUp,
)
from trencadis.registry.building import Builder

__all__ = [
    "AnyEngine",
    "BareParts",
    "EngineKinds",
    "EngineParts",
    "MOMENTS",
    "Made",
    "Makings",
    "PassBuckets",
    "SamplingRules",
    "Stage",
    "Stages",
]


@attrs.frozen(kw_only=True, eq=False)
class Made:
    """A component that was built for an engine.

    Attributes:
        label: Names it and its distribution in messages.
        component: The object that its factory returned.
        make_fallback: Makes what takes over from it; None: nothing does.
        remake: Makes it again in the process of a rank, to which this function can travel: returns another ``Made``, and what measures calls
            there. None: everything runs in this process.
    """

    label: str
    component: Any
    make_fallback: Callable[[], Any] | None = None
    remake: Callable[[], tuple[Made, Callable[..., CallMeter]]] | None = None


@attrs.frozen(kw_only=True, eq=False)
class SamplingRules:
    """What the configured sampler says of requests; by default, that of an engine composed without plugins.

    Attributes:
        check: Raises for sampling parameters that it cannot serve.
        prepare: Begins what it has to do before a request with these parameters can run; the second argument is the key of who asks.
        can_start_with: Whether it could have chosen a token for a sequence at the end of its prompt.
        is_portable: Whether a sequence with these parameters may go on here after tokens that another engine chose.
        fingerprint: Tells another engine how tokens are chosen here; None: none is to choose one.
    """

    check: Callable[[SamplingParams], None] = lambda _: None
    prepare: Callable[[SamplingParams, str], tuple[Future[Any], ...]] = lambda _, __: ()
    can_start_with: Callable[[RowStart, int], bool] = lambda _, __: True
    is_portable: Callable[[SamplingParams], bool] = lambda _: True
    fingerprint: SamplingFingerprint | None = None


@attrs.frozen(kw_only=True, eq=False)
class Makings:
    """What a stage is made of, before the cache is allocated.

    Attributes:
        config: The whole configuration.
        model: The loaded model.
        executor: Runs batches; the model is loaded.
        layout: Over how many ranks the model is divided.
        made: Returns the component of a noun, or None if the configuration chooses none.
        meter: Returns what measures the calls of a component, by its noun and label, and ``thread`` if it is not the engine's.
        components: Name, distribution, version and digest of every component, by dotted path of the setting that names it.
        builder: Makes components by any plan; None: the engine was composed without plugins.
        sampling: Says what the sampler can do for a request.
        device_label: Names executor and backend in messages.
    """

    config: Config
    model: ModelFacts
    executor: Executor
    layout: ParallelLayout
    made: Callable[[str], Made | None]
    meter: Callable[..., CallMeter]
    components: Mapping[str, tuple[str, str, str, str]] = attrs.Factory(dict)
    builder: Builder | None = None
    sampling: SamplingRules = attrs.Factory(SamplingRules)
    device_label: str = "the executor"


class PassBuckets(Protocol):
    """The buckets in which passes run.

    Attributes:
        ready: Those that the device has prepared, at the start or when a pass first needed one.
        substitute: Called with the shape of a pass and its bucket; returns the bucket in which the pass runs. None: in its own.
    """

    ready: set[Bucket]
    substitute: Callable[[Shape, Bucket], Bucket] | None

    def prepared(self, buckets: tuple[Bucket, ...]) -> None:
        """Note buckets that the device has prepared."""

    def padded_tokens(self, num_sequences: int, query_len: int) -> int:
        """Return the token positions of a decode pass over so many sequences with so many tokens each."""
        ...


@attrs.frozen(kw_only=True, eq=False)
class EngineKinds:
    """What an engine is put together from: classes of the core, or those that a stage puts in their place.

    Attributes:
        depth: Steps in flight at once, at least 1.
        num_parts: Parts of equal size into which rows and blocks are divided; a sequence has all that it has in one of them.
        num_to_verify: Most tokens of a sequence that a step verifies.
        kv_bytes_per_token: Kept on the device for each token beside the KV cache, bytes.
        blocks: Makes the KV blocks, a ``BlockManager`` with so many ``parts``; takes ``num_blocks``, those of all parts, and ``make_eviction``,
            which returns another guarded eviction policy each time.
        passes: Makes what splits plans into passes, from the arguments of ``PassPlanner``; ``limits`` are those of a part.
        policy: Makes the guarded scheduling policy, from the engine's state and the arguments of ``GuardedScheduling``.
        scheduler: Makes what makes plans, from the arguments of ``Scheduler``; with ``propose`` it asks for tokens to verify before each plan.
    """

    depth: int
    num_parts: int = 1
    num_to_verify: int = 0
    kv_bytes_per_token: int = 0
    blocks: Callable[..., Any]
    passes: Callable[..., Any]
    policy: Callable[..., Any]
    scheduler: Callable[..., Any]


@attrs.frozen(kw_only=True, eq=False)
class BareParts:
    """What the engine of a model that generates nothing is made of; see ``StageDefinition.make_engine``.

    Attributes:
        config: The whole configuration.
        executor: The model is loaded.
        model: The loaded model.
        max_model_len: Longest text, tokens.
        plan_hash: Hash of the resolved plugins, versions and options.
        metrics: Returns what the observers measured, in Prometheus' text format.
        switched_off: Returns the answer to the question of that name.
        restart: Starts lost ranks again, or raises a ``BackendError``.
        close: Closes observers and executor; to be called once.
    """

    config: Config
    executor: Executor
    model: ModelFacts
    max_model_len: int
    plan_hash: str
    metrics: Callable[[], str]
    switched_off: Callable[[], dict[str, Any]]
    restart: Callable[[RanksLostError], None]
    close: Callable[[], None]


class AnyEngine(Protocol):
    """What clients use of an engine, whatever its model does; all of it as :class:`~trencadis.engine.engine.Engine` has it."""

    model: ModelFacts
    max_model_len: int
    totals: EngineTotals

    @property
    def plan_hash(self) -> str:
        """Hash of the resolved plugins, versions and options."""
        ...

    @property
    def hashing(self) -> tuple[str, int] | None:
        """What block hashes depend on, and tokens per block; None: there are none."""
        ...

    @property
    def has_work(self) -> bool:
        """True while a step can change anything."""
        ...

    @property
    def is_stalled(self) -> bool:
        """True if stepping at once would be busy waiting."""
        ...

    @property
    def num_running(self) -> int:
        """Sequences that hold a row."""
        ...

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        ...

    def wake_by(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called, from any thread, when there is work between two steps."""
        ...

    def add(self, request: Request) -> int:
        """Queue a request; returns its slot."""
        ...

    def take(self, request: Any) -> None:
        """Queue a request of another kind."""
        ...

    def abort(self, request_id: str) -> FinishedSequence | None:
        """End a request at once; returns its sequence."""
        ...

    def stop(self, request_id: str) -> FinishedSequence | None:
        """End a request because its text is complete."""
        ...

    def withdraw(self, request_id: str) -> FinishedSequence | None:
        """End a request that another engine goes on with; None if it stays."""
        ...

    def step(self) -> TokenDeltas:
        """Take a step; returns what came of it."""
        ...

    def work_ahead(self) -> float | None:
        """Use idle time; returns seconds until the next call pays."""
        ...

    def load(self) -> EngineLoad:
        """Return how much there is to do."""
        ...

    def answer(self, question: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to an operator's question, or make a change."""
        ...

    def metrics(self) -> str:
        """Return what is measured, in Prometheus' text format."""
        ...

    def close(self) -> None:
        """End every request and free everything; may be called twice."""
        ...


@attrs.frozen(kw_only=True, eq=False)
class EngineParts:
    """The parts of an engine that a stage may use, on the engine's thread.

    Attributes:
        config: The whole configuration.
        state: Sequences, rows, blocks and queues; a stage changes them by the methods of the state alone.
        executor: Runs batches; the model is loaded and the cache allocated.
        model: The loaded model.
        limits: Sizes of this engine.
        depth: Most steps in flight at once.
        policy: The scheduling policy.
        in_flight: Steps that were submitted and are not committed, the oldest first.
        kept: Parts that keep something from step to step beside the state, by name: ``scheduler``, ``order``, ``preemptor``, ``recovery``,
            ``policy``, and the stages that can be restored.
        add: Queues a request as a client's is; returns its slot.
        abort: Ends a request in any state; returns its sequence, or None if there is none of this id.
        append: Gives tokens to a sequence that holds no row, int32 ``[n]``; returns it if the last of them ends it.
        ended: Sequences that ended outside a commit; the next step announces what is appended.
        wake: Wakes the engine's loop, from any thread: there is work.
        tell: Calls ``Stage.hear`` of every stage.
        warm_up: Buckets that were prepared before the first request.
        buckets: The buckets in which passes run.
        take_part: With False a stage has nothing to do in steps for now: ``before_step``, ``after_plan``, ``after_build``, ``received`` and
            ``after_step`` are not called, and ``wants_step`` is not asked. True is the start.
        totals: Counters since the start.
    """

    config: Config
    state: EngineState
    executor: Executor
    model: ModelFacts
    limits: BucketLimits
    depth: int
    policy: Guarded[SchedulingPolicy]
    in_flight: deque[SubmittedStep]
    kept: Mapping[str, Restorable]
    add: Callable[[Request], int]
    abort: Callable[[str], FinishedSequence | None]
    append: Callable[[Sequence, Int32Array], FinishedSequence | None]
    ended: list[FinishedSequence]
    wake: Callable[[], None]
    tell: Callable[[Obstacle | SchedulingChanged], None]
    warm_up: WarmUp
    buckets: PassBuckets
    take_part: Callable[[Stage, bool], None]
    totals: EngineTotals


def _claim_test(method: str, answer: Any, sequence: Sequence) -> Claim | None:
    if answer is None:
        return None
    if not isinstance(answer, Claim):
        raise ContractError(f"{method}() returned {shown(answer)}, where a Claim or None is expected")
    if not isinstance(answer.when, When):
        raise ContractError(f"{method}() returned a claim whose when is {shown(answer.when)}, no When")
    most = len(sequence.tokens) - (method == "claim")  # one is left to compute
    if not 0 <= answer.num_tokens <= most:
        raise ContractError(
            f"{method}() claims {shown(answer.num_tokens)} tokens of a sequence, where {most} can be claimed"
        )
    return answer


def _kept_test(method: str, answer: Any, sequence: Sequence, leaving: Leaving) -> Claim | None:
    if not 0 <= leaving.num_kept_blocks <= len(leaving.blocks):
        raise ContractError(
            f"num_kept_blocks is {shown(leaving.num_kept_blocks)}; {len(leaving.blocks)} blocks are left behind"
        )
    if isinstance(answer, Claim) and leaving.reason is not None:
        raise ContractError(f"{method}() claims what a sequence had that has ended")
    return _claim_test(method, answer, sequence)


def _batch_test(method: str, answer: Any) -> Batch | None:
    if answer is None or isinstance(answer, Batch):
        return answer
    raise ContractError(f"{method}() returned {shown(answer)}, where a Batch or None is expected")


def _deltas_test(method: str, answer: object, deltas: TokenDeltas) -> TokenDeltas:
    if answer is deltas:
        return deltas
    if not isinstance(answer, TokenDeltas):
        raise ContractError(f"{method}() returned {shown(answer)}, where TokenDeltas are expected")
    if len(answer.slots) != len(answer.num_tokens) or int(answer.num_tokens.sum()) != len(answer.token_ids):
        raise ContractError(f"{method}() returned {shown(answer)}, whose arrays do not fit together")
    lost = {one.request_id for one in deltas.finished} - {one.request_id for one in answer.finished}
    if lost:
        raise ContractError(f"{method}() left out that requests have ended: {shown(sorted(lost))}")
    return answer


def _pause_test(method: str, answer: object) -> float | None:
    if answer is None or (isinstance(answer, int | float) and answer >= 0):
        return answer
    raise ContractError(f"{method}() returned {shown(answer)}, where seconds or None are expected")


_PAUSE = Law("seconds from 0 on, or None", _pause_test)
_CLAIM = Law("a ``Claim`` to fewer tokens than the sequence has, or None", _claim_test, ("sequence",))
_KEPT = Law(
    "a ``Claim`` to no more tokens than the sequence has, or None; None for one that ends",
    _kept_test,
    ("sequence", "leaving"),
)
_BATCH = Law("a ``Batch``, or None", _batch_test)
_DELTAS = Law("``TokenDeltas`` with every sequence that has ended", _deltas_test, ("deltas",))


class Stage:
    """A part of the engine that the configuration can leave out; its state lives in it.

    A stage defines the moments that it needs; the others cost nothing. All are called on the engine's thread.

    Attributes:
        name: The name of its definition; set before it is bound.
        label: Names it and its distribution in messages, and has its faults contained; empty: it is built in. Set with ``name``.
        remedy: Says what to do about its faults; set with ``name``.
        num_faults: Calls that raised or broke a law, where faults are contained.
        accepts_last: ``accept`` is called after the scheduling policy has accepted the request: for what costs something.
        answers: Answers to questions of operators, by question; each takes a table of arguments and returns a table.
        takes: Kinds of requests other than ``Request`` that it serves, and what queues one, or refuses it by a ``RequestError``.
    """

    name = label = remedy = ""
    num_faults = 0
    accepts_last = False
    answers: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {}
    takes: Mapping[type, Callable[[Any], None]] = {}

    def compose(self, kinds: EngineKinds) -> EngineKinds:
        """Return what the engine is put together from; called once, before anything is sized."""
        return kinds

    def allocate(self, plan: AllocationPlan) -> AllocationPlan:
        """Return what is to be allocated; called once, before the executor is asked for it."""
        return plan

    def bind(self, engine: EngineParts) -> None:
        """Take the parts of the engine; called once, when the cache is allocated and before the first request."""

    # ------------------------------------------------------------------------------------------------- moments

    @law(of_type(Request))
    def accept(self, request: Request) -> Request:
        """Return a new request, completed; it was checked, and is not queued yet.

        Raises:
            RequestError: It is refused; no other request suffers.
        """
        return request

    @tell_always
    def refused(self, request: Request) -> None:
        """Called when a request was refused, by a stage, by the scheduling policy or because it makes no sense."""

    @law(of_type(str), otherwise="")
    def added(self, sequence: Sequence) -> str:
        """Called when a request has become a sequence; returns why it cannot run yet, in a word, or an empty string.

        One that cannot is set aside until the stage calls ``EngineState.resume``.
        """
        return ""

    @tell
    def before_step(self) -> None:
        """Called at the start of each step, before anything is planned.

        Raises:
            RanksLostError: The executor has to be started again; sequences go on with the tokens that they have.
        """

    @law(_CLAIM)
    def claim(self, sequence: Sequence, *, num_found: int) -> Claim | None:
        """Return where KV of a waiting sequence is beyond what the prefix cache has, or why it must wait; None: this stage has none.

        Args:
            sequence: It waits, and there may be room for it.
            num_found: Leading blocks that the prefix cache holds.
        """
        return None

    @tell
    def after_plan(self, step: SubmittedStep | None) -> None:
        """Called when a plan is made, before its batch is built; None: the attempt came to nothing."""

    @law(_BATCH)
    def after_build(self, step: SubmittedStep, batch: Batch) -> Batch | None:
        """Called when the batch is built, before it is submitted; returns another batch in its place, or None.

        An exception fails the step without submitting it.
        """

    @tell
    def received(self, step: SubmittedStep, output: StepOutput) -> None:
        """Called with the output of each step, before its tokens are committed, or dropped because an older step failed."""

    @law(of_type(str), otherwise="")
    def fault_in(self, output: StepOutput) -> str:
        """Return what is wrong with what this stage reads of an output, after "the output of step 3", or an empty string; the step fails."""
        return ""

    @law(_DELTAS)
    def after_step(self, step: SubmittedStep | None, output: StepOutput | None, deltas: TokenDeltas) -> TokenDeltas:
        """Return the new tokens of all sequences; called at the end of each step, before they are counted.

        Args:
            step: The step that was committed; None: none was.
            output: Output of the step.
            deltas: New tokens and finished sequences, as stages before this one left them.
        """
        return deltas

    @law(_KEPT, always=True)
    def leaving(self, sequence: Sequence, leaving: Leaving) -> Claim | None:
        """Called when a sequence is preempted or ends, in whatever state, before it gives up what it holds.

        Args:
            sequence: In the state that it leaves.
            leaving: Why it leaves, and its blocks; the stage may keep blocks, and add parameters for another engine.

        Returns:
            A claim to what a preempted sequence has computed; None: it will be computed again.
        """
        return None

    @tell_always
    def left(self, finished: FinishedSequence) -> None:
        """Called once for each sequence that left the engine, when its end is announced."""

    @tell_always
    def failed(self, plans: Iterable[Plan], error: Exception) -> None:
        """Called when steps failed, before their sequences are computed anew.

        Args:
            plans: The failed one first, then those submitted after it, which are dropped. Empty: ranks were lost outside a step; or, if
                ``error`` is no ``RanksLostError``, a strategy failed for good, and every live request ends.
            error: A ``RanksLostError``: no KV block holds anything any more.
        """

    # ------------------------------------------------------------------------------------------------- questions

    wants_step = False
    """Whether a step is useful although no sequence could run."""

    has_orders = False
    """Whether the executor's side has to be told something that no step has carried yet; the engine takes a last step for it."""

    @law(of_type(bool), otherwise=False)
    def wants_empty_plan(self) -> bool:
        """Return whether a plan without any sequence is to be run; asked when there is one."""
        return False

    awaits = False
    """Whether something from outside is awaited: with nothing else to do, stepping at once would be busy waiting."""

    @law(of_type(bool), otherwise=False)
    def drop(self, request_id: str) -> bool:
        """Forget a request of a kind that this stage takes; False: it has none of this id."""
        return False

    @law(_PAUSE)
    def idle(self) -> float | None:
        """Use the time while there is no work; a request that arrives meanwhile waits until this returns.

        Returns:
            Seconds until it pays to call again; None: not before there was work.
        """
        return None

    @tell
    def hear(self, notice: Obstacle | SchedulingChanged) -> None:
        """Called with each event outside the steps, such as lost ranks or a change of the scheduling policy."""

    @tell_always
    def inspect(self) -> Any:
        """Return a copy of the stage's state for tests and debuggers; None: there is nothing to show."""
        return None

    @law(of_type(Mapping), always=True, otherwise=MappingProxyType({}))
    def metrics(self) -> Mapping[str, str]:
        """Return metrics in Prometheus' text format, by who is named if they cannot be shown."""
        return {}

    def dump(self, reason: str, cause: str) -> Path | None:
        """Write what the stage knows of the last steps to a file; returns its path, or None if that failed.

        Called from any thread, also while the engine hangs.

        Args:
            reason: ``stall`` or ``signal``.
            cause: Who asked.
        """
        return None

    @tell_always
    def close(self) -> None:
        """Free everything; called once, after the last step."""


MOMENTS: Final = (
    "accept",
    "refused",
    "added",
    "before_step",
    "claim",
    "after_plan",
    "after_build",
    "received",
    "after_step",
    "leaving",
    "left",
    "failed",
)
"""The moments of a step, in the order in which a request passes them."""

_CALLED = (*MOMENTS[1:], "wants_empty_plan", "idle", "drop", "fault_in", "hear", "dump")
_IN_STEPS = frozenset({"before_step", "after_plan", "after_build", "received", "after_step", "wants_step"})


def _defines(stage: Stage, name: str) -> bool:
    return getattr(type(stage), name) is not getattr(Stage, name)


class Stages:
    """The moments of an engine's stages, each in the order of the stages.

    Args:
        stages: Those that the configuration asks for, in order.
        guard: Returns what is called in the place of a stage: the stage itself, or its guard, whose ``end_failed`` is called in each step.

    Attributes:
        all: The stages.
        called: The stages or their guards.
        wants_empty_plan: The question of that name.
        idle: The same.
        drop: Methods that forget requests of other kinds.
        fault_in: Methods that check outputs.
        hear: Methods that hear notices.
        dump: Methods that write files of the last steps.
    """

    accept: tuple[Callable[[Request], Request], ...]
    accept_last: tuple[Callable[[Request], Request], ...]
    refused: tuple[Callable[[Request], None], ...]
    added: tuple[Callable[[Sequence], str], ...]
    before_step: tuple[Callable[[], None], ...]
    claim: tuple[Callable[..., Claim | None], ...]
    after_plan: tuple[Callable[[SubmittedStep | None], None], ...]
    after_build: tuple[Callable[[SubmittedStep, Batch], Batch | None], ...]
    received: tuple[Callable[[SubmittedStep, StepOutput], None], ...]
    after_step: tuple[Callable[[SubmittedStep | None, StepOutput | None, TokenDeltas], TokenDeltas], ...]
    leaving: tuple[Callable[[Sequence, Leaving], Claim | None], ...]
    left: tuple[Callable[[FinishedSequence], None], ...]
    failed: tuple[Callable[[Iterable[Plan], Exception], None], ...]
    wants_empty_plan: tuple[Callable[[], bool], ...]
    idle: tuple[Callable[[], float | None], ...]
    drop: tuple[Callable[[str], bool], ...]
    fault_in: tuple[Callable[[StepOutput], str], ...]
    hear: tuple[Callable[[Obstacle | SchedulingChanged], None], ...]
    dump: tuple[Callable[[str, str], Path | None], ...]

    def __init__(self, stages: Iterable[Stage] = (), *, guard: Callable[[Stage], Any] = lambda stage: stage) -> None:
        self.all = tuple(stages)
        self.called = tuple([guard(stage) for stage in self.all])
        self._resting: set[Stage] = set()
        self._collect()

    def take_part(self, stage: Stage, is_on: bool) -> None:
        """Call a stage at its moments of a step, or no more; see :class:`EngineParts`."""
        if (stage in self._resting) is is_on:
            (self._resting.discard if is_on else self._resting.add)(stage)
            self._collect()

    def _collect(self) -> None:
        for moment in _CALLED:
            setattr(self, moment, tuple([getattr(one, moment) for one in self._defining(moment)]))
        guards = [one for stage, one in zip(self.all, self.called, strict=True) if one is not stage]
        self.before_step = (*[one.end_failed for one in guards], *self.before_step)
        accepting = self._defining("accept")
        self.accept = tuple([one.accept for one in accepting if not one.accepts_last])
        self.accept_last = tuple([one.accept for one in accepting if one.accepts_last])
        self._wanting, self._awaiting = self._defining("wants_step"), self._defining("awaits")
        self._ordering = self._defining("has_orders")

    def _defining(self, name: str) -> tuple[Any, ...]:
        """Return what is called in the place of stages whose class defines an attribute of its own and that do not rest from it. Pure."""
        resting = self._resting if name in _IN_STEPS else ()
        pairs = zip(self.all, self.called, strict=True)
        return tuple([one for stage, one in pairs if _defines(stage, name) and stage not in resting])

    def end_step(self, step: SubmittedStep | None, output: StepOutput | None, deltas: TokenDeltas) -> TokenDeltas:
        """Return what the stages make of the new tokens at the end of a step; see ``Stage.after_step``."""
        for act in self.after_step:
            deltas = act(step, output, deltas)
        return deltas

    @property
    def wants_step(self) -> bool:
        """Whether a step is useful although no sequence could run."""
        return any(one.wants_step for one in self._wanting) or self.has_orders

    @property
    def has_orders(self) -> bool:
        """Whether the executor's side of a stage has to be told something."""
        return any(one.has_orders for one in self._ordering)

    @property
    def awaits(self) -> bool:
        """Whether a stage awaits something from outside."""
        return any(one.awaits for one in self._awaiting)

    @property
    def are_busy(self) -> bool:
        """Whether a step is useful to a stage that awaits nothing."""
        return any(one.wants_step and not one.awaits for one in self._wanting)
