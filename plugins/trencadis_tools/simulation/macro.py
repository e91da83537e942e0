"""A short form of the engine for thousands of replicas: first come, first served, chunked prefill and blocks, by counts alone.

It plans as the engine does with ``fcfs``, without prefix caching and with one step after the other, and it is checked against the
engine before it is used: the first requests of the workload, on one replica, must come out the same, request by request.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from operator import attrgetter, itemgetter

import attrs
import numpy as np

from trencadis.api import Config, EngineTotals, Registry, resolve_plan
from trencadis.clock import SimulatedClock
from trencadis.console import Advance
from trencadis.errors import CapabilityError, PromptTooLongError, StepFailedError
from trencadis.records import (
    EngineLoad,
    FinishedSequence,
    FinishReason,
    Request,
    SamplingParams,
    StepShape,
    TokenDeltas,
    evolve_unchecked,
)
from trencadis_plugins.scheduling.config import FcfsConfig
from trencadis_tools.simulation.drafts import speculates
from trencadis_tools.simulation.events import ReplicaEvent
from trencadis_tools.simulation.executor import Timeline
from trencadis_tools.simulation.fleet import MAX_STEADY_STEPS, Fleet, simulated_config
from trencadis_tools.simulation.quiet import quiet_engines
from trencadis_tools.simulation.replica import Replica, Unfinished
from trencadis_tools.simulation.run import RequestRecord, Run
from trencadis_tools.simulation.step_shape import StepTimes
from trencadis_tools.workloads.workload import Workload

__all__ = ["MacroEngine", "MacroFleet", "check_macro", "simulate_macro"]

_REQUEST = Request(request_id="", prompt_token_ids=(0,), cache_salt="")
_NUM_CHECKED = 300
_TOLERANCE_S = 1e-9
_NONE = np.empty(0, np.int32)
_EMPTY = TokenDeltas(slots=_NONE, num_tokens=_NONE, token_ids=_NONE)


@quiet_engines()
def simulate_macro(
    config: Config,
    registry: Registry,
    workload: Workload,
    *,
    step_times: StepTimes,
    replicas: int = 1,
    events: Sequence[ReplicaEvent] = (),
    note: Advance | None = None,
) -> Run:
    """Serve a workload on macro replicas, after a check against the engine; arguments and result are those of :func:`simulate`.

    Raises:
        CapabilityError: The configuration is not covered, or the check found a difference.
        TrencadisError: See :func:`simulate`.
    """
    check_macro(config, registry, workload, step_times=step_times, num_replicas=replicas)
    fleet = MacroFleet(config, registry, workload, step_times=step_times, replicas=replicas, events=events, note=note)
    if fleet.mover is not None:
        raise CapabilityError(
            "macro replicas move no requests, and the router does.",
            hint="Use --replica-model engine, or set router.max_moves = 0.",
        )
    return fleet.run()


def check_macro(
    config: Config, registry: Registry, workload: Workload, *, step_times: StepTimes, num_replicas: int
) -> None:
    """Compare a macro replica with the engine on the first requests of a workload.

    Args:
        config: Of the engines.
        registry: The plugins.
        workload: Its times are stretched to what one of the replicas gets.
        step_times: How long steps take.
        num_replicas: That the workload is for.

    Raises:
        CapabilityError: The configuration is not covered, or a request comes out otherwise.
    """
    simulated = simulated_config(config, workload, num_replicas=num_replicas)
    _check_covered(attrs.evolve(simulated, speculation=config.speculation), registry)
    first = [attrs.evolve(one, arrival_s=one.arrival_s * num_replicas) for one in workload.requests[:_NUM_CHECKED]]
    part = attrs.evolve(workload, requests=tuple(first))
    fleet = Fleet(config, registry, part, step_times=step_times)
    try:
        real = fleet.run()
    finally:
        fleet.close()
    macro = MacroFleet(config, registry, part, step_times=step_times).run()
    for one, other in zip(real.records, macro.records, strict=True):
        if not _is_same(one, other):
            raise CapabilityError(
                f"the macro replica differs from the engine at request {one.request.request_id!r}: first token at "
                f"{other.first_token_s:.9g} s and not at {one.first_token_s:.9g} s, end at {other.finished_s:.9g} s and not at "
                f"{one.finished_s:.9g} s.",
                hint="Use --replica-model engine.",
            )


def _is_same(one: RequestRecord, other: RequestRecord) -> bool:
    def near(a: float, b: float) -> bool:
        return abs(a - b) <= _TOLERANCE_S or (math.isnan(a) and math.isnan(b))

    times = all(near(getattr(one, name), getattr(other, name)) for name in ("sent_s", "first_token_s", "finished_s"))
    counts = (one.num_output_tokens, one.num_preemptions, bool(one.error))
    return times and counts == (other.num_output_tokens, other.num_preemptions, bool(other.error))


def _check_covered(config: Config, registry: Registry) -> None:
    """Refuse what the macro replica does not do.

    Raises:
        CapabilityError: Names every setting, and what it has to be.
    """
    choice = resolve_plan(config, registry).choices["scheduling"]
    is_plain = choice.component.name == "fcfs" and choice.options == FcfsConfig()
    num_seqs, budget = config.engine.max_num_seqs, config.engine.max_num_batched_tokens
    wrong = {
        'scheduling.name = "fcfs", with its defaults': not is_plain,
        "cache.prefix_caching = false": config.cache.prefix_caching,
        'speculation.name = "none"': speculates(config),
        "engine.async_scheduling = false": config.engine.async_scheduling,
        'engine.preemption = "recompute"': config.engine.preemption != "recompute",
        'kv_connector.name = "none"': config.kv_connector.name not in ("", "none"),
        "scheduling.tenants without entries": bool(config.scheduling.tenants),
        f"engine.max_num_batched_tokens of at least engine.max_num_seqs = {num_seqs}": budget < num_seqs,
    }
    if any(wrong.values()):
        needed = "; ".join(setting for setting, is_wrong in wrong.items() if is_wrong)
        raise CapabilityError(
            f"--replica-model macro covers less than the engine; it needs {needed}.",
            hint="Set that, or use --replica-model engine.",
        )


class _Lengths:
    """Requests of a workload by their lengths: their tokens are all the same, and nothing looks at them."""

    def __init__(self, workload: Workload) -> None:
        self._requests = workload.requests
        self._index_of = {one.request_id: index for index, one in enumerate(workload.requests)}
        self._longest = max(one.num_output_tokens for one in workload.requests)
        self._params: dict[int, SamplingParams] = {}
        self._tokens = (2,) * max(one.num_prompt_tokens for one in workload.requests)
        self.vocab_size = 3

    def request(self, index: int, before: Sequence[int] = ()) -> Request:
        """Return request ``index``, with as many tokens as it has."""
        asked = self._requests[index]
        length = asked.num_prompt_tokens
        if asked.continues:
            previous = self._requests[self._index_of[asked.after]]
            length += len(before) - previous.num_prompt_tokens - previous.num_output_tokens
        most = asked.max_tokens or self._longest
        params = self._params.get(most)
        if params is None:
            params = self._params[most] = SamplingParams(max_tokens=most)
        return evolve_unchecked(
            _REQUEST,
            request_id=asked.request_id,
            prompt_token_ids=self._tokens[:length],
            params=params,
            priority=asked.priority,
            tenant=asked.tenant,
        )

    def text(self, request: Request, end: FinishedSequence) -> Sequence[int]:
        """Return prompt and answer, of which the length alone counts."""
        return range(len(request.prompt_token_ids) + len(end.token_ids))


class MacroFleet(Fleet):
    """A fleet of macro replicas."""

    def _prompts_of(self, workload: Workload) -> _Lengths:
        self._outputs = {one.request_id: one.num_output_tokens for one in workload.requests}
        return _Lengths(workload)

    def _build(self, index: int) -> Replica:
        clock = SimulatedClock(self._clock.time_s)
        engine = MacroEngine(self._config, Timeline(clock, self._step_times), clock, self._outputs, self._max_model_len)
        replica = MacroReplica(index, len(self.built), engine, clock, engine, refused=self._refused)
        self.built.append(replica)
        return replica


class MacroReplica(Replica):
    """A replica whose engine is a :class:`MacroEngine`."""

    def _unfinished(self, hidden: TokenDeltas | None) -> list[Unfinished]:
        assert isinstance(self.engine, MacroEngine), "the fleet built it"
        return self.engine.unfinished(hidden)


class _Row:
    """One sequence.

    Attributes:
        request: Of it.
        num_prompt: Its tokens.
        num_known: Prompt and output.
        num_computed: Tokens whose KV is computed.
        num_blocks: That it holds.
        number: Of those that came to the engine before it.
        last: Known tokens with which it ends.
    """

    __slots__ = (
        "came_s",
        "first_s",
        "high_water",
        "last",
        "num_blocks",
        "num_computed",
        "num_known",
        "num_preemptions",
        "num_prompt",
        "number",
        "request",
        "scheduled_s",
    )

    def __init__(self, request: Request, number: int, last: int, came_s: float) -> None:
        self.request = request
        self.number = number
        self.num_prompt = len(request.prompt_token_ids)
        self.num_known = self.num_prompt + len(request.output_token_ids or ())
        self.num_computed = self.num_blocks = self.num_preemptions = self.high_water = 0
        self.last = last
        self.came_s = came_s
        self.scheduled_s: float | None = None
        self.first_s: float | None = None


class MacroEngine:
    """Steps of one engine by counts: it stands in a replica for the engine and for its executor.

    Args:
        config: Budget, rows, blocks.
        timeline: Of its device.
        clock: Of the replica.
        output_lens: True output tokens by request id.
        max_model_len: Longest sequence, tokens.
    """

    hashing: tuple[str, int] | None = None
    idle_until_s = -math.inf

    def __init__(
        self,
        config: Config,
        timeline: Timeline,
        clock: SimulatedClock,
        output_lens: dict[str, int],
        max_model_len: int,
    ) -> None:
        self.timeline = timeline
        self.totals = EngineTotals()
        self.num_submitted = 0
        self._clock = clock
        self._output_lens = output_lens
        self._max_model_len = max_model_len
        self._size = config.cache.block_size or 16
        self._num_blocks = self._num_free = config.cache.num_blocks
        self._watermark = int(config.cache.num_blocks * 0.01)
        self._budget = config.engine.max_num_batched_tokens
        self._max_num_seqs = config.engine.max_num_seqs
        self._max_preemptions = config.engine.max_preemptions
        self._max_wait_s = config.engine.max_wait_s
        self._waiting: deque[_Row] = deque()
        self._num_front = 0
        self._num_added = 0
        self._running: list[_Row] = []
        self._newest: list[_Row] = []  # those that got a token in the newest step
        self._ends: list[tuple[float, float]] = []
        self._tokens = np.broadcast_to(np.int32(0), max_model_len)

    # ------------------------------------------------------------------------------------------- as an engine

    def fail(self, now_s: float) -> None:
        """There are no transfers."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._running or self._waiting)

    @property
    def is_steady(self) -> bool:
        """Whether a stretch of steps is under way."""
        return bool(self._ends)

    @property
    def num_running(self) -> int:
        """Sequences that run."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait."""
        return len(self._waiting)

    @property
    def stretch(self) -> MacroEngine:
        """What is under way, see :attr:`end_s`."""
        return self

    @property
    def end_s(self) -> float:
        """When the stretch ends at the latest."""
        return self._ends[-1][0]

    def load(self) -> EngineLoad:
        """Return how much there is to do."""
        used = (self._num_blocks - self._num_free) / self._num_blocks  # to the bit as an engine: routers compare
        return EngineLoad(num_waiting=len(self._waiting), num_running=len(self._running), kv_usage=used)

    def close(self) -> None:
        """There is nothing to close."""

    def add(self, request: Request) -> int:
        """Queue a request.

        Raises:
            PromptTooLongError: It has no room for one output token.
        """
        length = len(request.prompt_token_ids)
        if length >= self._max_model_len and request.output_token_ids is None:
            raise PromptTooLongError(f"request {request.request_id!r}: the prompt has {length} tokens.")
        most = min(self._output_lens[request.request_id], request.params.max_tokens or self._max_model_len)
        last = min(length + most, self._max_model_len)
        self._waiting.append(_Row(request, self._num_added, last, self._clock.now_s()))
        self._num_added += 1
        return 0

    def step(self) -> TokenDeltas:
        """Begin a stretch of steps, end the one under way, or compute one step."""
        if self._ends:
            return self._end_stretch()
        self.num_submitted += 1
        decodes = [row for row in self._running if row.num_known - row.num_computed == 1]
        prefills = [row for row in self._running if row.num_known - row.num_computed > 1]
        num_preempted = self._grow(decodes)
        if num_preempted:
            decodes = [row for row in decodes if row.num_blocks]
            prefills = [row for row in prefills if row.num_blocks]
        left = self._budget - len(decodes)
        chunks = []
        for row in prefills:
            if left > 0:
                chunks.append((row, min(row.num_known - row.num_computed, left)))
                left -= chunks[-1][1]
        admitted = [] if num_preempted else self._admit(left)
        chunks += admitted
        if not chunks and not num_preempted and self._begin_stretch(decodes):
            return _EMPTY
        return self._compute(decodes, chunks, num_new=len(admitted))

    def unfinished(self, hidden: TokenDeltas | None) -> list[Unfinished]:
        """Return what has not ended, in the order of :meth:`Replica.fail`.

        Args:
            hidden: What the step that runs gives, or None: none runs.
        """
        newest = self._newest if hidden is not None else ()
        ended = () if hidden is None else hidden.finished
        left = [Unfinished(end.request_id, (0,) * (len(end.token_ids) - 1), end) for end in ended]
        for row in sorted([*self._running, *self._waiting], key=attrgetter("number")):
            num_tokens = row.num_known - row.num_prompt - (row in newest)
            left.append(Unfinished(row.request.request_id, (0,) * num_tokens, self._end(row, FinishReason.ABORT)))
        return left

    # --------------------------------------------------------------------------------------------------- plans

    def _grow(self, decodes: list[_Row]) -> int:
        """Give decodes the blocks for their tokens; returns how many sequences lost theirs for that."""
        size, num_preempted = self._size, 0
        growing = [row for row in decodes if row.num_computed == row.num_blocks * size]
        while len(growing) > self._num_free:
            self._preempt()
            num_preempted += 1
            growing = [row for row in growing if row.num_blocks]
        for row in growing:
            row.num_blocks += 1
        self._num_free -= len(growing)
        return num_preempted

    def _preempt(self) -> None:
        """Take the blocks of the youngest sequence that was not preempted too often."""
        running = self._running
        if len(running) == 1:
            raise StepFailedError(
                f"request {running[0].request.request_id!r} failed: the KV cache of {self._num_blocks} blocks has no room for it alone"
            )
        rare = [row for row in running if row.num_preemptions < self._max_preemptions]
        victim = (rare or running)[-1]
        running.remove(victim)
        self._num_free += victim.num_blocks
        victim.high_water = max(victim.high_water, victim.num_computed)
        victim.num_computed = victim.num_blocks = 0
        victim.num_preemptions += 1
        self.totals.num_preempted += 1
        self._waiting.appendleft(victim)
        self._num_front += 1

    def _admit(self, left: int) -> list[tuple[_Row, int]]:
        """Admit while tokens, rows and blocks last; returns sequences and their first chunks."""
        waiting, running, admitted = self._waiting, self._running, []
        if waiting and self._num_front:
            self._check_order()
        while waiting and left > 0 and len(running) < self._max_num_seqs:
            row = waiting[0]
            num_blocks = -(-row.num_known // self._size)
            if num_blocks + (self._watermark if running else 0) > self._num_free:
                break
            waiting.popleft()
            self._num_front = max(0, self._num_front - 1)
            row.num_blocks = num_blocks
            self._num_free -= num_blocks
            running.append(row)
            if row.scheduled_s is None:
                row.scheduled_s = self._clock.now_s()
                self.totals.num_prompt_tokens_admitted += row.num_prompt
            admitted.append((row, min(row.num_known, left)))
            left -= admitted[-1][1]
        return admitted

    def _check_order(self) -> None:
        """Refuse to go on where ages would change the order: sequences that waited too long overtake preempted ones."""
        before_s = self._clock.now_s() - self._max_wait_s
        if any(row.came_s < before_s for row in self._waiting):
            raise CapabilityError(
                f"a request waited longer than engine.max_wait_s = {self._max_wait_s:g} s while preempted ones waited: the macro replica "
                "does not order these.",
                hint="Use --replica-model engine, a lower rate, or a larger cache.num_blocks.",
            )

    # --------------------------------------------------------------------------------------------------- steps

    def _begin_stretch(self, decodes: list[_Row]) -> bool:
        """Begin several steps at once if every sequence decodes, and none gets its first token or ends in the next one."""
        most = MAX_STEADY_STEPS
        for row in decodes:
            most = min(most, row.last - row.num_known - 1)
            if most < 2 or row.first_s is None:
                return False
        if self._lacks(most):
            most = bisect_left(range(2, most + 1), True, key=self._lacks) + 1
        if most < 2:
            return False
        number, context = len(decodes), sum(row.num_computed for row in decodes)
        shape = StepShape(num_decodes=number, num_decode_tokens=number, num_decode_context=context + number)
        self._ends = self.timeline.begin(shape, most)
        return True

    def _lacks(self, num_steps: int) -> bool:
        """Return whether there are too few blocks for so many steps and one more."""
        size = self._size
        if (num_steps // size + 2) * len(self._running) <= self._num_free:
            return False
        needed = sum(max(-(-(row.num_computed + num_steps + 1) // size) - row.num_blocks, 0) for row in self._running)
        return needed > self._num_free

    def _end_stretch(self) -> TokenDeltas:
        """Count the steps that have begun by now."""
        ends, size, totals = self._ends, self._size, self.totals
        self._ends = []
        del ends[bisect_left(ends, self.timeline.until_s, key=itemgetter(0)) + 1 :]
        self.timeline.end(ends)
        self.timeline.pass_until(ends)
        num_steps = len(ends)
        self._newest = self._running
        for row in self._running:
            row.num_computed += num_steps
            row.num_known += num_steps
            num_blocks = -(-row.num_computed // size)
            if num_blocks > row.num_blocks:
                self._num_free -= num_blocks - row.num_blocks
                row.num_blocks = num_blocks
        totals.num_steps += num_steps
        totals.num_scheduled_tokens += num_steps * len(self._running)
        totals.device_s += sum(map(itemgetter(1), ends))
        return _EMPTY

    def _compute(self, decodes: list[_Row], chunks: list[tuple[_Row, int]], *, num_new: int) -> TokenDeltas:
        """Compute one step."""
        shape = _shape(decodes, chunks, num_new)
        totals = self.totals
        if not shape.num_tokens:
            return _EMPTY
        ends = self.timeline.begin(shape, 1)
        self.timeline.end(ends)
        self.timeline.pass_until(ends)
        totals.num_steps += 1
        totals.num_scheduled_tokens += shape.num_tokens
        totals.device_s += ends[0][1]
        now_s = self._clock.now_s()
        finished, self._newest = [], []
        for row, length in [*((row, 1) for row in decodes), *chunks]:
            totals.num_recomputed_tokens += max(0, min(row.high_water, row.num_computed + length) - row.num_computed)
            row.num_computed += length
            if row.num_computed < row.num_known:
                continue
            row.num_known += 1
            self._newest.append(row)
            if row.first_s is None:
                row.first_s = now_s
            if row.num_known == row.last:
                finished.append(self._finish(row))
        return attrs.evolve(_EMPTY, finished=tuple(finished)) if finished else _EMPTY

    def _finish(self, row: _Row) -> FinishedSequence:
        self._running.remove(row)
        self._num_free += row.num_blocks
        self.totals.num_finished += 1
        return self._end(row, FinishReason.STOP)

    def _end(self, row: _Row, reason: FinishReason) -> FinishedSequence:
        return FinishedSequence(
            request_id=row.request.request_id,
            slot=0,
            token_ids=self._tokens[: row.num_known - row.num_prompt],
            finish_reason=reason,
            num_prompt_tokens=row.num_prompt,
            num_cached_tokens=0,
            num_preemptions=row.num_preemptions,
            arrival_s=row.came_s,
            first_scheduled_s=row.scheduled_s,
            first_token_s=row.first_s,
            finish_s=self._clock.now_s(),
        )


def _shape(decodes: list[_Row], chunks: list[tuple[_Row, int]], num_new: int) -> StepShape:
    """Return the sizes of a step; a chunk of one token is a decode, as in :func:`trencadis.records.step_shape`. Pure."""
    num_decodes, context = len(decodes), sum(row.num_computed for row in decodes) + len(decodes)
    num_prefills = num_tokens = num_context = 0
    products = 0.0
    for row, length in chunks:
        start = row.num_computed
        if length == 1:
            num_decodes, context = num_decodes + 1, context + start + 1
            continue
        num_prefills += 1
        num_tokens += length
        num_context += start + length
        products += length * start + length * (length + 1) / 2
    return StepShape(
        num_decodes=num_decodes,
        num_prefills=num_prefills,
        num_decode_tokens=num_decodes,
        num_prefill_tokens=num_tokens,
        num_decode_context=context,
        num_prefill_context=num_context,
        prefill_products=products,
        num_new=num_new,
    )
