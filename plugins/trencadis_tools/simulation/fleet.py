"""A workload on simulated replicas: real engines and policies, the real router in front, one order of events.

    arrivals ▶ router ▶ replica (engine, clock) ▶ SimulatedExecutor (step times, true lengths)
        ▲         ▲        │
        │         └────────┤ a request that the router moves, after the step that runs
        └──────────────────┘ a session's next request: after the answer, and the time to think

Events are ordered by (time, kind, index). What a step gives is seen when the step has ended, never before. Equal inputs give equal
records on every machine: no wall clock, no iteration over sets, no random numbers but those of policies, which have seeds.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from trencadis.api import Config, Registry, build_engine
from trencadis.clock import SimulatedClock
from trencadis.console import Advance
from trencadis.errors import ConfigValueError, InternalError, RequestError, StepFailedError
from trencadis.records import EmbeddingRequest, EngineTotals, FinishedSequence, FinishReason, Request
from trencadis_remote.replicas.connect import make_mover, make_router, make_routing
from trencadis_remote.replicas.replica_set import ReplicaSet, Work
from trencadis_tools.simulated_store.store import Stores
from trencadis_tools.simulation.drafts import Drafter, DraftFacts, drafter_of, simulated_speculation
from trencadis_tools.simulation.events import EventKind, ReplicaEvent, check_events
from trencadis_tools.simulation.executor import KV_BYTES_PER_TOKEN, SimulatedExecutor, StepLog
from trencadis_tools.simulation.prompts import SimulatedPrompts
from trencadis_tools.simulation.quiet import quiet_engines
from trencadis_tools.simulation.replica import Replica, Unfinished, Watcher
from trencadis_tools.simulation.run import RequestRecord, Run
from trencadis_tools.simulation.steady import MAX_STEADY_STEPS, SteadyEngine
from trencadis_tools.simulation.step_shape import StepTimes
from trencadis_tools.simulation.step_times.buckets import BucketStepTimes
from trencadis_tools.workloads.workload import Workload

__all__ = ["NUM_BLOCKS", "Fleet", "has_store", "notes_on", "simulate", "simulated_config"]

SIMULATED_STORE = "simulated_store"
"""The KV connector that simulated replicas have; any other moves bytes."""

NUM_BLOCKS = 2588
"""KV blocks of a replica if the configuration names no number: an RTX 4090 with Llama 3.1 8B, as the default step times."""

_NOTES = 200
"""How often a run says how many requests have ended."""

_NAN = math.nan
_LITTLE = 1e-6
"""Relative error of sums of floating-point times."""


class _Clock:
    """The time of the event that happens.

    Attributes:
        time_s: Since the start of the run.
    """

    def __init__(self) -> None:
        self.time_s = 0.0

    def now_s(self) -> float:
        """Return it."""
        return self.time_s


class _Kind(enum.IntEnum):
    """Kinds of events, in the order in which those of one moment happen."""

    STEP_ENDS = 0
    REPLICA = 1
    SENT = 2
    MOVES = 3
    WAKES = 4
    STEP_BEGINS = 5


# Members of an enum are slow to look up.
_STEP_ENDS, _REPLICA, _SENT, _MOVES, _WAKES, _STEP_BEGINS = _Kind


@attrs.define(eq=False)
class _Live(Work):
    """A request that was sent and has not ended.

    Attributes:
        index: Index in the workload.
        sent_s: Time at which it was sent.
        last_replica: Replica that had it last; -1: none.
        num_shown_tokens: Number of output tokens that came by the last time that the router was asked for moves.
        first_token_s: When its first token came, from a replica that it has left since; NaN: none came there.
        num_cached_tokens: On the first replica; -1: none has begun it.
        num_preemptions: On replicas that it has left.
    """

    index: int = attrs.field(kw_only=True)
    sent_s: float = attrs.field(kw_only=True)
    last_replica: int = attrs.field(default=-1, kw_only=True)
    num_shown_tokens: int = attrs.field(default=0, kw_only=True)
    first_token_s: float = attrs.field(default=_NAN, kw_only=True)
    num_cached_tokens: int = attrs.field(default=-1, kw_only=True)
    num_preemptions: int = attrs.field(default=0, kw_only=True)

    @property
    def num_tokens(self) -> int:
        """Output tokens that came by now."""
        return self.num_shown_tokens


class _Engine:
    """An engine of the fleet as the set of replicas sees it."""

    stalled = ""  # nothing hangs here

    def __init__(self, fleet: Fleet, replica: Replica) -> None:
        self._fleet = fleet
        self.replica = replica

    def send(self, work: _Live, request: Request | EmbeddingRequest) -> None:
        """Add a request after the step that runs."""
        assert isinstance(request, Request), "a workload has no texts to embed"
        work.last_replica = self.replica.index
        self._fleet.sent(self.replica, request)

    def withdraw(self, work: _Live) -> None:
        """Take a request back when the step that runs has ended."""
        self._fleet.withdrawn(self.replica, work.request.request_id)

    def left(self, work: _Live) -> None:
        """Nothing is to be forgotten."""


def simulated_config(
    config: Config, workload: Workload, *, num_replicas: int = 1, drafter: Drafter | None = None
) -> Config:
    """Return the configuration of engines that this workload, policies and sizes matter to. Pure.

    A policy that fails has no fallback: what fails is to be seen. A speculator is replaced by one that needs no model, or by none if nothing
    says what becomes of drafts. A KV cache without a size gets :data:`NUM_BLOCKS`, or twice what the
    longest request takes if that is more.

    Raises:
        ConfigError: The speculator cannot be replaced.
    """
    longest = max(one.num_prompt_tokens + one.num_output_tokens for one in workload.requests)
    num_blocks = config.cache.num_blocks or max(NUM_BLOCKS, 2 * -(-longest // (config.cache.block_size or 16)))
    return attrs.evolve(
        config,
        model=attrs.evolve(config.model, max_model_len=0),
        parallel=attrs.evolve(config.parallel, data=num_replicas),
        cache=attrs.evolve(config.cache, num_blocks=num_blocks),
        scheduling=attrs.evolve(config.scheduling, fallback=""),
        speculation=simulated_speculation(config, drafter),
        draft_length=attrs.evolve(config.draft_length, fallback=""),
        budget=attrs.evolve(config.budget, speculation_ms=0.0),  # drafting takes simulated time
        kv_connector=attrs.evolve(config.kv_connector, name=SIMULATED_STORE if has_store(config) else "none"),
        observer=attrs.evolve(config.observer, names=()),
        flight_recorder=attrs.evolve(config.flight_recorder, num_steps=0),
    )


def has_store(config: Config) -> bool:
    """Return whether simulated replicas have a KV connector. Pure."""
    return config.kv_connector.name == SIMULATED_STORE


def notes_on(config: Config) -> tuple[str, ...]:
    """Return what a configuration names that simulated replicas go without, and what to do about it, in sentences. Pure."""
    name = config.kv_connector.name
    if name in ("", "none") or has_store(config):
        return ()
    return (
        f'[kv_connector] name = "{name}" moves bytes, which simulated replicas do not have: they run without it. To have its loads and '
        f'saves simulated, describe its store in [kv_connector.{SIMULATED_STORE}] and set name = "{SIMULATED_STORE}".',
    )


@quiet_engines()
def simulate(
    config: Config,
    registry: Registry,
    workload: Workload,
    *,
    step_times: StepTimes,
    replicas: int = 1,
    events: Sequence[ReplicaEvent] = (),
    watcher: Watcher | None = None,
    drafts: Mapping[str, DraftFacts] | None = None,
    token_times: bool = False,
    log: StepLog | None = None,
    note: Advance | None = None,
) -> Run:
    """Serve a workload on simulated replicas, and return what became of each request.

    Args:
        config: Router, scheduling, speculation, budget, rows, cache and simulated KV store of each replica; the model is not loaded, and
            other KV connectors are not simulated.
        registry: The plugins.
        workload: Which requests come when.
        step_times: How long steps take.
        replicas: How many, with equal configurations.
        events: Events of replicas.
        watcher: Sees what engines do.
        drafts: Acceptance of drafts, by name of the speculator; see :func:`load_drafts`.
        token_times: Whether records have the time of each token; 8 bytes for each of them.
        log: Notes the steps of a run of one replica; or None.
        note: Called now and then with the number of requests that have ended; or None.

    Raises:
        PluginError: A component does not exist or cannot be built.
        ConfigError: A size contradicts another, an event the replicas, or there is a speculator and ``drafts`` does not say how often it is
            right.
        StepFailedError: A policy, draft length or router broke its contract.
    """
    fleet = Fleet(
        config,
        registry,
        workload,
        step_times=step_times,
        replicas=replicas,
        events=events,
        watcher=watcher,
        drafter=drafter_of(config, drafts or {}, seed=workload.seed, step_times=step_times),
        token_times=token_times,
        log=log,
        note=note,
    )
    try:
        return fleet.run()
    finally:
        fleet.close()


class Fleet:
    """Serves one workload; see :func:`simulate`.

    Args:
        config: See :func:`simulate`; so are all but the last two.
        registry: The plugins.
        workload: The requests.
        step_times: How long steps take.
        replicas: How many.
        events: Events of the replicas.
        watcher: Sees what engines do; then each step is a plan of its own.
        max_steady_steps: Steps that an engine computes at once where nothing changes; 1: one by one, as always with drafts.
        drafter: Draws which drafts are accepted; None: there are none.
        token_times: See :func:`simulate`.
        log: See :func:`simulate`.
        note: See :func:`simulate`.

    Attributes:
        built: Replicas in the order in which their engines were built.
    """

    def __init__(
        self,
        config: Config,
        registry: Registry,
        workload: Workload,
        *,
        step_times: StepTimes,
        replicas: int = 1,
        events: Sequence[ReplicaEvent] = (),
        watcher: Watcher | None = None,
        max_steady_steps: int = MAX_STEADY_STEPS,
        drafter: Drafter | None = None,
        token_times: bool = False,
        log: StepLog | None = None,
        note: Advance | None = None,
    ) -> None:
        if replicas < 1:
            raise ConfigValueError(f"replicas = {replicas}: there must be one at least.")
        self._config = simulated_config(config, workload, num_replicas=replicas, drafter=drafter)
        self._registry = registry
        self._requests = workload.requests
        self._step_times = step_times
        self._drafter = drafter
        self._log = log
        self._note, self._num_ended = note, 0
        self._noted_each = max(1, len(workload.requests) // _NOTES)
        self._watcher = watcher
        self._max_steady_steps = 1 if watcher is not None else max_steady_steps
        self._token_times: dict[str, list[float]] | None = {} if token_times else None
        self._output_lens = [one.num_output_tokens for one in workload.requests]
        self._prompts = SimulatedPrompts(workload)
        longest = max(one.num_prompt_tokens + one.num_output_tokens for one in workload.requests)
        cache = self._config.cache
        self._max_model_len = min(longest + 1, cache.num_blocks * (cache.block_size or 16))
        self._changes = check_events(events, replicas)
        self._clock = _Clock()
        self._events: list[tuple[float, _Kind, int]] = []
        self._arrivals: list[tuple[float, _Kind, int]] = []  # known from the start: the last one is the next
        self._records: list[RequestRecord | None] = [None] * len(workload.requests)
        self._texts: dict[str, Sequence[int]] = {}  # prompts and answers that requests to come begin with
        self._ended_totals: list[tuple[int, EngineTotals]] = []
        self._stores = Stores()
        self._area = self._residence_s = 0.0
        self._num_buckets = 0
        self._are_moves_due = False
        self._followers: dict[str, list[int]] = {}
        self._continued = Counter(one.after for one in workload.requests if one.continues)
        for index, one in enumerate(workload.requests):
            if one.after:
                self._followers.setdefault(one.after, []).append(index)
            else:
                self._arrivals.append((one.arrival_s, _SENT, index))
        self._arrivals.reverse()
        self.built: list[Replica] = []
        self._set = self._open(replicas)

    # -------------------------------------------------------------------------------------------------- replicas

    def _open(self, num_replicas: int) -> ReplicaSet[_Live, _Engine]:
        """Return the set with every replica but those that join later."""
        first = {event.replica: event.kind for event in reversed(self._changes)}
        for number, event in enumerate(self._changes):
            self._push(event.time_s, _REPLICA, number)
        present = [index for index in range(num_replicas) if first.get(index) is not EventKind.JOIN]
        built = [self._build(index) for index in present]
        routing = mover = None
        if num_replicas > 1:
            example = built[0] if built else self._build(0)
            router = make_router(self._config, self._registry, clock=self._clock)
            routing = make_routing(self._config, router, hashing=example.engine.hashing, clock=self._clock)
            mover = make_mover(self._config, router, routing, clock=self._clock)
        replicas: ReplicaSet[_Live, _Engine] = ReplicaSet(
            num_replicas, routing=routing, mover=mover, on_end=_never, on_refusal=_never
        )
        for replica in built:
            self._join(replicas, replica)
        return replicas

    def _build(self, index: int) -> Replica:
        clock = SimulatedClock(self._clock.time_s)
        executor = SimulatedExecutor(
            clock,
            self._step_times,
            self._output_lens,
            max_model_len=self._max_model_len,
            vocab_size=self._prompts.vocab_size,
            layout=self._step_times.layout if isinstance(self._step_times, BucketStepTimes) else "ragged",
            drafter=self._drafter,
            kv_bytes_per_token=getattr(self._step_times, "kv_bytes_per_token", KV_BYTES_PER_TOKEN),
            stores=self._stores,
            load_timeout_s=self._config.cache.load_timeout_s,
            log=self._log,
        )
        engine = build_engine(self._config, registry=self._registry, clock=clock, executor=executor, kind=SteadyEngine)
        if not isinstance(engine, SteadyEngine):
            raise InternalError("a simulated model generates")
        engine.skip_steps(executor, max_steps=self._max_steady_steps)
        self._num_buckets = len(engine.warm_up.buckets)
        replica = Replica(index, len(self.built), engine, clock, executor, refused=self._refused, watcher=self._watcher)
        replica.token_times = self._token_times
        self.built.append(replica)
        return replica

    def _join(self, replicas: ReplicaSet[_Live, _Engine], replica: Replica) -> None:
        if replicas.routing is not None:
            replica.reported = replicas.routing.loaded
        replica.is_there = True
        replicas.join(replica.index, _Engine(self, replica))

    def _change(self, event: ReplicaEvent) -> None:
        engine = self._set.seats[event.replica].engine
        if event.kind is EventKind.JOIN:
            if engine is not None and (engine.replica.has_work or engine.replica.deltas is not None):
                engine.replica.joins_when_empty = True
            else:
                self._restart(event.replica)
        elif event.kind is EventKind.DRAIN and engine is not None:
            self._set.drain(event.replica)
        elif engine is not None:
            self._fail(engine.replica)

    def _restart(self, index: int) -> None:
        engine = self._set.seats[index].engine
        if engine is not None:
            self._remove(engine.replica)
            engine.replica.engine.close()
        self._join(self._set, self._build(index))
        self._settle()

    def _fail(self, replica: Replica) -> None:
        """End a replica; its requests go on elsewhere after the tokens that came."""
        self._remove(replica)
        now_s = self._clock.time_s
        if replica.is_open:
            replica.close(now_s)
        seat = self._set.seats[replica.index]
        # In the order in which the engine gives them back.
        seat.work = {one.request_id: self._noted(one) for one in replica.fail(now_s)}
        self._set.lose(replica.index)
        self._settle()

    def _remove(self, replica: Replica) -> None:
        self._ended_totals.append((replica.index, replica.engine.totals))
        replica.is_there = False
        self._set.remove(replica.index)

    # ----------------------------------------------------------------------------------------------------- moves

    def _ask_for_moves(self) -> None:
        """Have the router move requests; each leaves its replica when the step that runs there has ended."""
        mover = self._set.mover
        assert mover is not None, "it has asked for this event"
        for _, engine in self._set.live:
            for request_id, num_tokens in engine.replica.output_lens(self._clock.time_s).items():
                self._set.work[request_id].num_shown_tokens = num_tokens
        self._set.move()
        self._check_router()
        self._are_moves_due = bool(self._set.work)
        if self._set.work:
            self._push(self._clock.time_s + mover.period_s, _MOVES, 0)

    def withdrawn(self, replica: Replica, request_id: str) -> None:
        """Let a request leave a replica when the step that runs there has ended."""
        replica.leaving.append(request_id)
        if replica.is_open:
            self._close(replica)
        if replica.deltas is None:
            self._let_go(replica)

    def _let_go(self, replica: Replica) -> None:
        """Move the requests that are to leave a replica, no step of which runs."""
        leaving, replica.leaving = replica.leaving, []
        for request_id in leaving:
            if request_id in self._set.work:
                self._set.moved(self._noted(replica.withdraw(request_id)))
                self._settle()
        if (
            replica.wakes_s < math.inf and not replica.is_scheduled
        ):  # loads that were given up hold blocks until they are reported
            replica.is_scheduled = True
            self._push(self._clock.time_s, _STEP_BEGINS, replica.serial)

    def _noted(self, one: Unfinished) -> _Live:
        """Return a request that leaves its replica, with what came of it there."""
        live = self._set.work[one.request_id]
        # One that has no token is admitted again.
        live.tokens, live.is_new = list(one.token_ids), not one.token_ids
        if one.end is not None:
            _note_residence(live, one.end, self._clock.time_s)
        return live

    # -------------------------------------------------------------------------------------------------- requests

    def _send(self, index: int) -> None:
        asked = self._requests[index]
        now_s = self._clock.time_s
        before: Sequence[int] = ()
        if asked.continues:
            waiting = self._continued[asked.after] = self._continued[asked.after] - 1
            before = self._texts[asked.after] if waiting else self._texts.pop(asked.after)
        request = self._prompts.request(index, before)
        if self._token_times is not None:
            self._token_times[asked.request_id] = []
        self._set.place(_Live(request, index=index, sent_s=now_s))
        self._check_router()
        if self._set.mover is not None and not self._are_moves_due:
            self._are_moves_due = True
            self._push(now_s + self._set.mover.period_s, _MOVES, 0)

    def sent(self, replica: Replica, request: Request) -> None:
        """Give a request to a replica, which takes it after the step that runs."""
        replica.inbox.append(request)
        if replica.is_open:
            self._close(replica)
        elif not replica.is_scheduled:
            replica.is_scheduled = True
            self._push(max(self._clock.time_s, replica.clock.now_s()), _STEP_BEGINS, replica.serial)

    def _settle(self) -> None:
        self._set.settle()
        self._check_router()

    def _check_router(self) -> None:
        if self._set.routing is not None and self._set.routing.generation:
            raise StepFailedError("the router failed; see the log.", hint="Mend it, or choose another in router.name.")

    def _refused(self, request: Request, error: RequestError) -> None:
        self._end(self._set.work[request.request_id], self._clock.time_s, error=str(error))

    def _finished(self, end: FinishedSequence) -> None:
        if end.finish_reason is FinishReason.ERROR:
            raise StepFailedError(f"request {end.request_id!r} failed: {end.error}")
        live = self._set.work[end.request_id]
        if end.request_id in self._continued:
            assert isinstance(live.request, Request), "a workload has no texts to embed"
            self._texts[end.request_id] = self._prompts.text(live.request, end)
        self._end(live, end.finish_s, end=end)

    def _end(self, live: _Live, end_s: float, *, end: FinishedSequence | None = None, error: str = "") -> None:
        """Record a request that has ended, and send those that follow it."""
        self._set.forget(live)
        self._residence_s += end_s - live.sent_s
        asked = self._requests[live.index]
        if end is not None:
            _note_residence(live, end, end_s)
        self._records[live.index] = RequestRecord(
            request=asked,
            sent_s=live.sent_s,
            first_token_s=live.first_token_s,
            finished_s=_NAN if end is None else end_s,
            replica=max(live.last_replica, 0),
            num_cached_tokens=max(live.num_cached_tokens, 0),
            num_output_tokens=0 if end is None else len(end.token_ids),
            num_preemptions=live.num_preemptions,
            error=error,
            token_times_s=None if self._token_times is None else np.array(self._token_times.pop(asked.request_id)),
        )
        self._count_end()
        self._follow(asked.request_id, end_s, error)

    def _count_end(self) -> None:
        self._num_ended += 1
        if self._note is not None and self._num_ended % self._noted_each == 0:
            self._note(self._num_ended)

    def _follow(self, request_id: str, end_s: float, error: str) -> None:
        for index in self._followers.get(request_id, ()):
            asked = self._requests[index]
            if not error:
                self._push(max(asked.arrival_s, end_s + asked.think_s), _SENT, index)
                continue
            self._records[index] = RequestRecord(
                request=asked,
                sent_s=_NAN,
                first_token_s=_NAN,
                finished_s=_NAN,
                error=f"{request_id!r}, which it follows, had no answer",
            )
            self._count_end()
            self._follow(asked.request_id, end_s, error)

    # ------------------------------------------------------------------------------------------------------- run

    @property
    def num_plans(self) -> int:
        """Steps that engines planned; some stand for several."""
        return sum(replica.executor.num_submitted for replica in self.built)

    @property
    def num_steps(self) -> int:
        """Steps that were computed."""
        return sum(replica.engine.totals.num_steps for replica in self.built)

    def run(self) -> Run:
        """Serve everything.

        Raises:
            StepFailedError: A policy or router broke its contract.
        """
        events, arrivals, clock = self._events, self._arrivals, self._clock
        while events or arrivals:
            is_arrival = not events or (bool(arrivals) and arrivals[-1] < events[0])
            time_s, kind, index = arrivals.pop() if is_arrival else heapq.heappop(events)
            if kind is _WAKES and self.built[index].wakes_s != time_s:
                continue  # a request came before, and a step has begun
            if time_s > clock.time_s:
                self._area += len(self._set.work) * (time_s - clock.time_s)
                clock.time_s = time_s
            if kind is _SENT:
                self._send(index)
            elif kind is _REPLICA:
                self._change(self._changes[index])
            elif kind is _MOVES:
                self._ask_for_moves()
            elif self.built[index].is_there:  # else it has failed
                happens = (
                    self._wakes if kind is _WAKES else self._step_ends if kind is _STEP_ENDS else self._step_begins
                )
                happens(self.built[index])
        while self._set.unplaced:
            self._end(self._set.unplaced.popleft(), clock.time_s, error="no replica serves")
        self._check()
        return self._result()

    def _check(self) -> None:
        """Check that the run is whole: Little's law L = λW with L integrated over events and W summed over requests.

        Both sides are multiplied by the duration of the run.

        Raises:
            InternalError: It does not hold, or a request has no record.
        """
        if any(record is None for record in self._records):
            missing = self._requests[self._records.index(None)].request_id
            raise InternalError(
                f"request {missing!r} of the workload was not answered: it follows one that is not there"
            )
        if abs(self._area - self._residence_s) > _LITTLE * max(self._area, self._residence_s):
            raise InternalError(
                f"Little's law does not hold: {self._area!r} request-seconds by events, {self._residence_s!r} by requests"
            )

    def close(self) -> None:
        """Close every engine."""
        for replica in self.built:
            replica.engine.close()

    def _push(self, time_s: float, kind: _Kind, index: int) -> None:
        heapq.heappush(self._events, (time_s, kind, index))

    def _step_begins(self, replica: Replica) -> None:
        replica.step(self._clock.time_s)
        if replica.is_open or replica.deltas is not None:
            self._push(replica.ends_s, _STEP_ENDS, replica.serial)
            return
        replica.is_scheduled = False
        if replica.wakes_s < math.inf:
            self._push(replica.wakes_s, _WAKES, replica.serial)
        elif replica.joins_when_empty:
            self._restart(replica.index)

    def _wakes(self, replica: Replica) -> None:
        """Begin a step because a KV transfer has ended, unless one begins now anyway."""
        if not replica.is_scheduled:
            replica.is_scheduled = True
            self._step_begins(replica)

    def _close(self, replica: Replica) -> None:
        """Have a stretch of steps end with the one that runs now."""
        ends_s = replica.ends_s
        replica.close(self._clock.time_s)
        if replica.ends_s != ends_s:
            self._push(replica.ends_s, _STEP_ENDS, replica.serial)

    def _step_ends(self, replica: Replica) -> None:
        if replica.ends_s != self._clock.time_s:
            return  # the stretch of steps has been cut
        if replica.is_open:
            replica.close(self._clock.time_s)
        deltas, replica.deltas, replica.ends_s = replica.deltas, None, math.inf
        assert deltas is not None, "a step ends once"
        if self._token_times is not None:
            replica.note_times(deltas)
        if self._watcher is not None:
            self._watcher.stepped(replica.index, deltas)
        for end in deltas.finished:
            self._finished(end)
        if replica.leaving:
            self._let_go(replica)
        replica.report(has_ended=bool(deltas.finished))
        self._push(self._clock.time_s, _STEP_BEGINS, replica.serial)

    def _result(self) -> Run:
        ended = [*self._ended_totals, *((seat.index, one.replica.engine.totals) for seat, one in self._set.live)]
        busy_s = [0.0] * len(self._set.seats)
        for index, totals in ended:
            busy_s[index] += totals.device_s
        records = tuple(record for record in self._records if record is not None)

        def total(name: str) -> int:
            return sum(getattr(totals, name) for _, totals in ended)

        if total("num_drafters_quarantined"):
            raise StepFailedError(
                "speculation went off; see the log.",
                hint="Mend the draft length, or choose another in draft_length.name.",
            )
        return Run(
            records=records,
            duration_s=max((one.finished_s for one in records if not one.error), default=0.0),
            num_steps=total("num_steps"),
            num_scheduled_tokens=total("num_scheduled_tokens"),
            num_recomputed_tokens=total("num_recomputed_tokens"),
            num_preemptions=total("num_preempted"),
            busy_s=tuple(busy_s),
            end_s=self._clock.time_s,
            num_prompt_tokens_admitted=total("num_prompt_tokens_admitted"),
            num_prompt_tokens_cached=total("num_prompt_tokens_cached"),
            num_plans=self.num_plans,
            num_moved=sum(one.num_lost for one in self._set.seats),
            num_buckets=self._num_buckets,
            num_draft_tokens=total("num_draft_tokens"),
            num_accepted_tokens=total("num_accepted_tokens"),
            num_rebalanced=sum(one.num_moved for one in self._set.seats),
            num_refused_moves=0 if self._set.mover is None else self._set.mover.num_refused,
            kv=self._stores.traffic if self._stores.is_used else None,
        )


def _never(_: object, error: object) -> None:
    raise InternalError(f"a simulated engine refuses and ends at its own time: {error}")


def _note_residence(live: _Live, end: FinishedSequence, now_s: float) -> None:
    """Add what a request had on one replica.

    Args:
        live: The request.
        end: Ended sequence on that replica.
        now_s: Time after which nothing counts.
    """
    if math.isnan(live.first_token_s) and end.first_token_s is not None and end.first_token_s <= now_s:
        live.first_token_s = end.first_token_s
    if live.num_cached_tokens < 0 and end.first_scheduled_s is not None:
        live.num_cached_tokens = end.num_cached_tokens
    live.num_preemptions += end.num_preemptions
