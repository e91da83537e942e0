"""Scheduling policies on one workload: the real engine and the real policies, on a simulated device and clock.

workload ▶ engine (policy under test) ▶ SimulatedExecutor (step times, true lengths) ▶ latencies

Policies do not see true output lengths: ``max_tokens`` of a request is the longest output of the workload, unless set.
"""

from __future__ import annotations

import attrs
import numpy as np
from attrs.validators import ge, gt

from trencadis.api import Config, Registry
from trencadis.errors import ConfigError
from trencadis.records import FloatArray, Request, StepTime, TokenDeltas
from trencadis_tools.bench.latencies import Latencies
from trencadis_tools.bench.service_gap import ServiceGap
from trencadis_tools.simulation import StepShape, simulate
from trencadis_tools.workloads import Workload, load_workload
from trencadis_tools.workloads.terms import (
    Prefixes,
    Priorities,
    Targets,
    Tenants,
    with_prefixes,
    with_priorities,
    with_targets,
    with_tenants,
)

__all__ = ["Line", "ScheduleResult", "ScheduleWorkload", "measure_schedule"]

_PROMPT_PRICE, _OUTPUT_PRICE = 1.0, 2.0


@attrs.frozen(kw_only=True)
class ScheduleWorkload:
    """Rate and size of a workload, and the fields drawn for requests that lack them.

    Attributes:
        rate: Requests per second, reached by stretching arrival times; 0: the workload's own.
        limit: Number of requests taken from the start of the workload.
        num_tenants: Number of tenants, drawn for a workload without tenants; tenant k has a share in proportion to 1 / (k + 1).
        num_priorities: Number of priorities, drawn evenly from 0 (most urgent) up for a workload without priorities.
        shared_prefix: Tokens that all prompts of a tenant begin with, cut to the prompt's length; 0: as the workload says.
        ttft_target_s: TTFT target of requests without one, seconds; goodput counts requests that keep both targets.
        tpot_target_s: TPOT target of requests without one, seconds.
        num_blocks: Blocks of the KV cache, if the configuration gives no number.
        seed: Seed of all draws; 0: the workload's own.
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

    def load(self, name_or_path: str) -> Workload:
        """Load a workload with :func:`trencadis_tools.workloads.load_workload`, and complete it.

        Raises:
            ConfigError: The workload does not exist, cannot be used, or already defines shared prefixes.
        """
        return self.complete(
            load_workload(name_or_path, seed=self.seed or None, rate=self.rate or None, limit=self.limit)
        )

    def complete(self, workload: Workload) -> Workload:
        """Return the workload with drawn values for fields that its requests lack. Pure.

        Raises:
            ConfigError: The workload already defines shared prefixes.
        """
        seed, requests, block_tokens = self.seed or workload.seed, list(workload.requests), workload.block_tokens
        if all(one.tenant == "default" for one in requests):
            requests = with_tenants(requests, Tenants(num=self.num_tenants), seed=seed)
        if not any(one.priority for one in requests):
            requests = with_priorities(requests, Priorities(shares=(1.0,) * self.num_priorities), seed=seed)
        requests = with_targets(requests, Targets(ttft_s=self.ttft_target_s, tpot_s=self.tpot_target_s))
        if self.shared_prefix:
            if any(one.block_ids for one in requests):
                raise ConfigError(
                    f"shared_prefix = {self.shared_prefix}, but workload {workload.name} tells what prompts share.",
                    hint="Leave shared_prefix out.",
                )
            requests = with_prefixes(requests, Prefixes(tokens=self.shared_prefix), seed=seed)
            block_tokens = self.shared_prefix
        return attrs.evolve(workload, requests=tuple(requests), block_tokens=block_tokens)


@attrs.frozen(kw_only=True)
class ScheduleResult:
    """Result of the workload under one policy. Times are simulated, in seconds.

    Attributes:
        policy: Name of the scheduling policy.
        num_requests: Requests that finished.
        num_refused: Requests refused by the policy, or too long for the KV cache.
        duration_s: Time from the first arrival to the last token.
        ttft_mean_s: Mean time from sending to the first token.
        ttft_p99_s: 99th percentile of TTFT.
        urgent_ttft_p99_s: 99th percentile of TTFT of requests with priority 0.
        tpot_mean_s: Mean of TPOT, the time from the first to the last token divided by the tokens after the first; requests with at
            least two tokens.
        tpot_p99_s: 99th percentile of TPOT.
        e2e_mean_s: Mean time from sending to the last token.
        e2e_p99_s: 99th percentile of the end-to-end latency.
        goodput: Requests per second that kept both targets.
        num_preempted: Number of preemptions.
        recompute_ratio: Tokens computed a second time divided by tokens computed.
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
    workload: Workload,
    *,
    policy: str,
    num_blocks: int = 2588,
    step_time: StepTime | None = None,
) -> ScheduleResult:
    """Serve the workload under one policy, and return the measurements.

    Args:
        config: Token budget, rows, cache, and options of policies; the model is not loaded.
        registry: The plugins.
        workload: The requests.
        policy: Name of a scheduling component, or an import path.
        num_blocks: Blocks of the KV cache, if the configuration gives no number.
        step_time: Linear model of step times; None: the defaults of ``StepTime``.

    Raises:
        PluginError: The policy does not exist or cannot be built.
        ConfigValueError: A size contradicts another.
        StepFailedError: The policy broke its contract.
    """
    config = attrs.evolve(
        config,
        cache=attrs.evolve(config.cache, num_blocks=config.cache.num_blocks or num_blocks),
        scheduling=attrs.evolve(config.scheduling, name=policy),
        speculation=attrs.evolve(config.speculation, name="none"),
    )
    notes = _Service(workload)
    run = simulate(config, registry, workload, step_times=Line(step_time or StepTime()), watcher=notes)
    latencies = Latencies()
    for record in run.records:
        if not record.error:
            latencies.add(record)
    duration_s = run.end_s - workload.requests[0].arrival_s
    return ScheduleResult(
        policy=policy,
        num_refused=sum(bool(record.error) for record in run.records),
        duration_s=duration_s,
        **latencies.summary(duration_s),
        num_preempted=run.num_preemptions,
        recompute_ratio=run.num_recomputed_tokens / max(1, run.num_scheduled_tokens),
        service_gap=notes.gap.largest,
        prefix_hit_ratio=run.num_prompt_tokens_cached / max(1, run.num_prompt_tokens_admitted),
    )


@attrs.frozen
class Line:
    """Linear step times of ``StepTime``, independent of the kind of step; host time is 0."""

    step_time: StepTime

    def device_s(self, shape: StepShape) -> float:
        """Return the device time of a step, seconds."""
        num_tokens = shape.num_decode_tokens + shape.num_prefill_tokens
        return self.step_time.step_s(float(num_tokens), shape.num_decode_context + shape.num_prefill_context)

    def host_s(self, shape: StepShape) -> float:
        """Return 0."""
        return 0.0


class _Service:
    """Tracks the service gap between tenants in a run of one engine."""

    def __init__(self, workload: Workload) -> None:
        self._numbers = {name: number for number, name in enumerate(sorted({one.tenant for one in workload.requests}))}
        self._tenant_of_slot = np.zeros(256, np.int64)
        self._unserved: dict[int, int] = {}  # prompt tokens of slots without a token so far
        self.gap = ServiceGap(len(self._numbers))

    def added(self, replica: int, slot: int, request: Request) -> None:
        """Record the tenant of a slot."""
        if slot >= len(self._tenant_of_slot):
            self._tenant_of_slot = np.resize(self._tenant_of_slot, 2 * slot)
        self._tenant_of_slot[slot] = self._numbers[request.tenant]
        self._unserved[slot] = len(request.prompt_token_ids)
        self.gap.waits(self._numbers[request.tenant])

    def stepped(self, replica: int, deltas: TokenDeltas) -> None:
        """Count the service that a step gave to each tenant."""
        if deltas.slots.size:
            tenants = self._tenant_of_slot[deltas.slots]
            costs: FloatArray = _OUTPUT_PRICE * deltas.num_tokens.astype(np.float64)
            for place, slot in enumerate(deltas.slots.tolist()):
                if slot in self._unserved:
                    costs[place] += _PROMPT_PRICE * self._unserved.pop(slot)
                    self.gap.runs(int(tenants[place]))
            self.gap.serve(tenants, costs)
