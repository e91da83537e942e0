"""Scheduling policies on one trace: the real engine and the real policies, on a simulated device and clock.

arrivals ▶ requests ▶ engine (policy under test) ▶ SimulatedExecutor (step times, true lengths) ▶ latencies

A policy sees no true length: every request allows the longest output of the trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np
from attrs.validators import ge, gt

from trencadis.api import Config, Registry
from trencadis.records import FloatArray, Request, StepTime, TokenDeltas
from trencadis_tools.bench.latencies import Latencies
from trencadis_tools.bench.service_gap import ServiceGap
from trencadis_tools.simulation import StepShape, simulate
from trencadis_tools.workloads import Workload, WorkloadRequest

if TYPE_CHECKING:
    from trencadis_plugins.bucketing.workloads.trace import Arrival

__all__ = ["Line", "ScheduleResult", "ScheduleWorkload", "measure_schedule"]

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
    requests = _workload(arrivals[: workload.limit], workload)
    config = attrs.evolve(
        config,
        cache=attrs.evolve(config.cache, num_blocks=config.cache.num_blocks or workload.num_blocks),
        scheduling=attrs.evolve(config.scheduling, name=policy),
    )
    notes = _Notes(requests.requests, workload)
    run = simulate(config, registry, requests, step_times=Line(step_time or StepTime()), watcher=notes)
    duration_s = run.end_s - requests.requests[0].arrival_s
    return ScheduleResult(
        policy=policy,
        num_refused=sum(bool(record.error) for record in run.records),
        duration_s=duration_s,
        **notes.latencies.summary(duration_s),
        num_preempted=run.num_preemptions,
        recompute_ratio=run.num_recomputed_tokens / max(1, run.num_scheduled_tokens),
        service_gap=notes.gap.largest,
        prefix_hit_ratio=run.num_prompt_tokens_cached / max(1, run.num_prompt_tokens_admitted),
    )


def _workload(arrivals: Sequence[Arrival], settings: ScheduleWorkload) -> Workload:
    """Return the requests that arrivals become. Pure."""
    rng = np.random.default_rng(settings.seed)
    shares = 1 / np.arange(1, settings.num_tenants + 1)
    tenants = rng.choice(settings.num_tenants, len(arrivals), p=shares / shares.sum()).tolist()
    priorities = rng.integers(settings.num_priorities, size=len(arrivals)).tolist()
    span_s = arrivals[-1].arrival_s
    stretch = (len(arrivals) - 1) / (settings.rate * span_s) if settings.rate and span_s else 1.0
    requests = tuple(
        WorkloadRequest(
            request_id=str(index),
            arrival_s=arrival.arrival_s * stretch,
            num_prompt_tokens=arrival.num_prompt_tokens,
            num_output_tokens=arrival.num_output_tokens,
            tenant=str(tenant),
            priority=priority,
            block_ids=tuple(
                range(
                    tenant * settings.shared_prefix,
                    tenant * settings.shared_prefix + min(settings.shared_prefix, arrival.num_prompt_tokens - 1),
                )
            ),
            ttft_target_s=settings.ttft_target_s,
            tpot_target_s=settings.tpot_target_s,
        )
        for index, (arrival, tenant, priority) in enumerate(zip(arrivals, tenants, priorities, strict=True))
    )
    return Workload(name="trace", requests=requests, block_tokens=1, seed=settings.seed)


@attrs.frozen
class Line:
    """The line of ``StepTime``, whatever a step consists of; the host takes no time."""

    step_time: StepTime

    def device_s(self, shape: StepShape) -> float:
        """Return it."""
        num_tokens = shape.num_decode_tokens + shape.num_prefill_tokens
        return self.step_time.step_s(float(num_tokens), shape.num_decode_context + shape.num_prefill_context)

    def host_s(self, shape: StepShape) -> float:
        """Return 0."""
        return 0.0


class _Notes:
    """Watches a run of one engine: latencies in the order in which requests end, and the gap in service between tenants."""

    def __init__(self, requests: Sequence[WorkloadRequest], settings: ScheduleWorkload) -> None:
        self._requests = requests
        self._tenant_of_slot = np.zeros(256, np.int64)
        self._unserved: dict[int, int] = {}  # prompt tokens of slots without a token so far
        self.gap = ServiceGap(settings.num_tenants)
        self.latencies = Latencies(settings.ttft_target_s, settings.tpot_target_s)

    def added(self, replica: int, slot: int, request: Request) -> None:
        """Note whose request a slot has."""
        if slot >= len(self._tenant_of_slot):
            self._tenant_of_slot = np.resize(self._tenant_of_slot, 2 * slot)
        self._tenant_of_slot[slot] = int(request.tenant)
        self._unserved[slot] = len(request.prompt_token_ids)
        self.gap.waits(int(request.tenant))

    def stepped(self, replica: int, deltas: TokenDeltas) -> None:
        """Note who was served, and what has ended."""
        if deltas.slots.size:
            tenants = self._tenant_of_slot[deltas.slots]
            costs: FloatArray = _OUTPUT_PRICE * deltas.num_tokens.astype(np.float64)
            for place, slot in enumerate(deltas.slots.tolist()):
                if slot in self._unserved:
                    costs[place] += _PROMPT_PRICE * self._unserved.pop(slot)
                    self.gap.runs(int(tenants[place]))
            self.gap.serve(tenants, costs)
        for end in deltas.finished:
            asked = self._requests[int(end.request_id)]
            self.latencies.add(end, arrival_s=asked.arrival_s, urgent=asked.priority == 0)
