"""Scheduling policies on one trace: the real engine and the real policies, on a simulated device and clock.

arrivals ▶ requests ▶ engine (policy under test) ▶ SimulatedExecutor (step times, true lengths) ▶ latencies

A policy sees no true length: every request allows the longest output of the trace.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np
from attrs.validators import ge, gt

from trencadis.api import Config, Engine, Registry, build_engine
from trencadis.clock import SimulatedClock
from trencadis.errors import InternalError, RequestError, StepFailedError
from trencadis.records import FinishReason, FloatArray, Request, SamplingParams, StepTime, TokenDeltas
from trencadis_tools.bench.latencies import Latencies
from trencadis_tools.bench.service_gap import ServiceGap
from trencadis_tools.bench.simulated import SimulatedExecutor

if TYPE_CHECKING:
    from trencadis_plugins.bucketing.workloads.trace import Arrival

__all__ = ["ScheduleResult", "ScheduleWorkload", "measure_schedule"]

_PROMPT_PRICE, _OUTPUT_PRICE = 1.0, 2.0


@attrs.frozen(kw_only=True)
class ScheduleWorkload:
    """What is run. The same workload gives the same requests on every machine.

    Attributes:
        rate: Requests a second, by stretching the trace's times; 0: as recorded.
        limit: The first so many requests of the trace.
        num_tenants: Drawn for each request, tenant k with a share in proportion to 1 / (k + 1).
        num_priorities: Drawn for each request, evenly from 0 (most urgent) up.
        shared_prefix: A tenant's prompts begin with the same so many tokens, as far as they are that long.
        ttft_target_s: Of every request; goodput counts those that keep both.
        tpot_target_s: Of every request.
        num_blocks: Of the KV cache, if the config names no number.
        seed: Of tenants, priorities and nothing else.
    """

    rate: float = attrs.field(default=0.0, validator=ge(0))
    limit: int = attrs.field(default=1000, validator=ge(1))
    num_tenants: int = attrs.field(default=4, validator=ge(1))
    num_priorities: int = attrs.field(default=3, validator=ge(1))
    shared_prefix: int = attrs.field(default=0, validator=ge(0))
    ttft_target_s: float = attrs.field(default=2.0, validator=gt(0))
    tpot_target_s: float = attrs.field(default=0.1, validator=gt(0))
    num_blocks: int = attrs.field(default=2588, validator=ge(2))
    seed: int = attrs.field(default=0, validator=ge(0))


@attrs.frozen(kw_only=True)
class ScheduleResult:
    """What became of the workload under one policy. Times are simulated.

    Attributes:
        policy: Its name.
        num_requests: Requests that finished.
        num_refused: Refused by the policy, or too long for the KV cache.
        duration_s: From the first arrival to the last token.
        ttft_mean_s: Arrival to first token.
        ttft_p99_s: Of these the 99th percentile.
        urgent_ttft_p99_s: The same of priority 0.
        tpot_mean_s: First to last token by the tokens after the first; of requests with at least two.
        tpot_p99_s: Of these the 99th percentile.
        e2e_mean_s: Arrival to last token.
        e2e_p99_s: Of these the 99th percentile.
        goodput: Requests a second that kept both targets.
        num_preempted: Preemptions.
        recompute_ratio: Tokens computed a second time by tokens computed: the recompute tax.
        service_gap: Largest drift in service between two tenants with waiting requests; a prompt token costs 1, an output token 2.
        prefix_hit_ratio: Share of prompt tokens taken from the prefix cache.
    """

    policy: str
    num_requests: int
    num_refused: int
    duration_s: float
    ttft_mean_s: float
    ttft_p99_s: float
    urgent_ttft_p99_s: float
    tpot_mean_s: float
    tpot_p99_s: float
    e2e_mean_s: float
    e2e_p99_s: float
    goodput: float
    num_preempted: int
    recompute_ratio: float
    service_gap: float
    prefix_hit_ratio: float


def measure_schedule(
    config: Config,
    registry: Registry,
    arrivals: Sequence[Arrival],
    workload: ScheduleWorkload,
    *,
    policy: str,
    step_time: StepTime | None = None,
) -> ScheduleResult:
    """Serve the workload under one policy, and return what was measured.

    Args:
        config: Budget, rows, cache, and the options of policies; the model is not loaded.
        registry: The plugins.
        arrivals: By time.
        workload: How the arrivals become requests.
        policy: Name of a scheduling component, or an import path.
        step_time: How long steps take; the defaults of ``StepTime`` if None.

    Raises:
        PluginError: The policy does not exist or cannot be built.
        ConfigValueError: A size contradicts another.
        StepFailedError: The policy broke its contract.
    """
    requests = _requests(arrivals[: workload.limit], workload)
    return _Run(config, registry, requests, workload, policy, step_time or StepTime()).measure()


def _requests(arrivals: Sequence[Arrival], workload: ScheduleWorkload) -> list[tuple[float, int, Request]]:
    """Return arrival time, output length and request of each arrival. Pure."""
    rng = np.random.default_rng(workload.seed)
    shares = 1 / np.arange(1, workload.num_tenants + 1)
    tenants = rng.choice(workload.num_tenants, len(arrivals), p=shares / shares.sum()).tolist()
    priorities = rng.integers(workload.num_priorities, size=len(arrivals)).tolist()
    span_s = arrivals[-1].arrival_s
    stretch = (len(arrivals) - 1) / (workload.rate * span_s) if workload.rate and span_s else 1.0
    longest = max(arrival.num_output_tokens for arrival in arrivals)
    made = []
    for index, arrival in enumerate(arrivals):
        shared = min(workload.shared_prefix, arrival.num_prompt_tokens - 1)
        own = arrival.num_prompt_tokens - shared
        request = Request(
            request_id=str(index),
            # Tokens are numbers of requests, so that no prompts are alike beyond the shared prefix.
            prompt_token_ids=(1,) * shared + (index + 2,) * own,
            params=SamplingParams(max_tokens=longest),
            priority=priorities[index],
            tenant=str(tenants[index]),
            cache_salt=str(tenants[index]),
            ttft_target_s=workload.ttft_target_s,
            tpot_target_s=workload.tpot_target_s,
        )
        made.append((arrival.arrival_s * stretch, arrival.num_output_tokens, request))
    return made


class _Run:
    """One policy's engine, and what is noted of its steps."""

    def __init__(
        self,
        config: Config,
        registry: Registry,
        requests: list[tuple[float, int, Request]],
        workload: ScheduleWorkload,
        policy: str,
        step_time: StepTime,
    ) -> None:
        self._policy = policy
        self._requests = requests
        self._clock = SimulatedClock()
        num_blocks = config.cache.num_blocks or workload.num_blocks
        block_size = config.cache.block_size or 16
        longest = max(len(request.prompt_token_ids) + num_output for _, num_output, request in requests)
        executor = SimulatedExecutor(
            self._clock,
            step_time,
            [num_output for _, num_output, _ in requests],
            max_model_len=min(longest + 1, num_blocks * block_size),
        )
        engine = build_engine(
            _simulated(config, policy, num_blocks), registry=registry, clock=self._clock, executor=executor
        )
        if not isinstance(engine, Engine):
            raise InternalError("a simulated model generates")
        self._engine = engine
        self._tenant_of_slot = np.zeros(engine.max_model_len, np.int64)
        self._unserved: dict[int, int] = {}  # prompt tokens of slots without a token so far
        self._gap = ServiceGap(workload.num_tenants)
        self._latencies = Latencies(workload.ttft_target_s, workload.tpot_target_s)
        self._num_refused = 0

    def measure(self) -> ScheduleResult:
        """Serve everything."""
        waiting = deque(self._requests)
        try:
            while waiting or self._engine.has_work:
                while waiting and waiting[0][0] <= self._clock.now_s():
                    self._add(waiting.popleft()[2])
                if self._engine.has_work:
                    self._note(self._engine.step())
                elif waiting:
                    self._clock.advance(waiting[0][0] - self._clock.now_s())
            return self._result()
        finally:
            self._engine.close()

    def _add(self, request: Request) -> None:
        try:
            slot = self._engine.add(request)
        except RequestError as error:
            if isinstance(error.__cause__, StepFailedError):  # the policy failed: it refused no request
                raise error.__cause__ from None
            self._num_refused += 1
            return
        if slot >= len(self._tenant_of_slot):
            self._tenant_of_slot = np.resize(self._tenant_of_slot, 2 * slot)
        self._tenant_of_slot[slot] = int(request.tenant)
        self._unserved[slot] = len(request.prompt_token_ids)
        self._gap.waits(int(request.tenant))

    def _note(self, deltas: TokenDeltas) -> None:
        if deltas.slots.size:
            tenants = self._tenant_of_slot[deltas.slots]
            costs: FloatArray = _OUTPUT_PRICE * deltas.num_tokens.astype(np.float64)
            for place, slot in enumerate(deltas.slots.tolist()):
                if slot in self._unserved:
                    costs[place] += _PROMPT_PRICE * self._unserved.pop(slot)
                    self._gap.runs(int(tenants[place]))
            self._gap.serve(tenants, costs)
        for end in deltas.finished:
            if end.finish_reason is FinishReason.ERROR:
                raise StepFailedError(f"under {self._policy} request {end.request_id!r} failed: {end.error}")
            arrival_s, _, request = self._requests[int(end.request_id)]
            self._latencies.add(end, arrival_s=arrival_s, urgent=request.priority == 0)

    def _result(self) -> ScheduleResult:
        totals = self._engine.totals
        duration_s = self._clock.now_s() - self._requests[0][0]
        return ScheduleResult(
            policy=self._policy,
            num_refused=self._num_refused,
            duration_s=duration_s,
            **self._latencies.summary(duration_s),
            num_preempted=totals.num_preempted,
            recompute_ratio=totals.num_recomputed_tokens / max(1, totals.num_scheduled_tokens),
            service_gap=self._gap.largest,
            prefix_hit_ratio=totals.num_prompt_tokens_cached / max(1, totals.num_prompt_tokens_admitted),
        )


def _simulated(config: Config, policy: str, num_blocks: int) -> Config:
    """Return the configuration of an engine that only this policy and these sizes matter to. Pure."""
    return attrs.evolve(
        config,
        model=attrs.evolve(config.model, max_model_len=0),
        cache=attrs.evolve(config.cache, num_blocks=num_blocks),
        scheduling=attrs.evolve(config.scheduling, name=policy, fallback=""),  # what fails is to be seen
        speculation=attrs.evolve(config.speculation, name="none"),
        kv_connector=attrs.evolve(config.kv_connector, name="none"),
        observer=attrs.evolve(config.observer, names=()),
    )
