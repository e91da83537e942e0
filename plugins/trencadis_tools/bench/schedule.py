"""Scheduling policies on one workload: the real engine and the real policies, on a simulated device and clock.

workload ▶ engine (policy under test) ▶ SimulatedExecutor (step times, true lengths) ▶ latencies

A policy sees no true length: every request allows the longest output of the workload, unless it says another limit.
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
    """How a workload is taken, and what is drawn for requests that come without it.

    Attributes:
        rate: Requests a second, by stretching times; 0: as the workload has them.
        limit: The first so many requests.
        num_tenants: Drawn for each request of a workload that tells no tenants, tenant k with a share in proportion to 1 / (k + 1).
        num_priorities: Drawn for each request of a workload that tells no priorities, evenly from 0 (most urgent) up.
        shared_prefix: A tenant's prompts begin with the same so many tokens, as far as they are that long; 0: as the workload says.
        ttft_target_s: Of every request without a target of its own; goodput counts those that keep both.
        tpot_target_s: The same.
        num_blocks: Of the KV cache, if the config names no number.
        seed: Of all that is drawn; 0: the workload's own.
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
        """Return a workload as :func:`trencadis_tools.workloads.load_workload` finds it, taken this way.

        Raises:
            ConfigError: There is none, it cannot be used, or it tells already what prompts share.
        """
        return self.complete(
            load_workload(name_or_path, seed=self.seed or None, rate=self.rate or None, limit=self.limit)
        )

    def complete(self, workload: Workload) -> Workload:
        """Return the workload with what its requests lack. Pure.

        Raises:
            ConfigError: It tells already what prompts share.
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
    """What became of the workload under one policy. Times are simulated.

    Attributes:
        policy: Its name.
        num_requests: Requests that finished.
        num_refused: Refused by the policy, or too long for the KV cache.
        duration_s: From the first arrival to the last token.
        ttft_mean_s: From when it was sent to the first token.
        ttft_p99_s: Of these the 99th percentile.
        urgent_ttft_p99_s: The same of priority 0.
        tpot_mean_s: First to last token by the tokens after the first; of requests with at least two.
        tpot_p99_s: Of these the 99th percentile.
        e2e_mean_s: From when it was sent to the last token.
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
    workload: Workload,
    *,
    policy: str,
    num_blocks: int = 2588,
    step_time: StepTime | None = None,
) -> ScheduleResult:
    """Serve the workload under one policy, and return what was measured.

    Args:
        config: Budget, rows, cache, and the options of policies; the model is not loaded.
        registry: The plugins.
        workload: The requests.
        policy: Name of a scheduling component, or an import path.
        num_blocks: Of the KV cache, if the config names no number.
        step_time: How long steps take; the defaults of ``StepTime`` if None.

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
    """The line of ``StepTime``, whatever a step consists of; the host takes no time."""

    step_time: StepTime

    def device_s(self, shape: StepShape) -> float:
        """Return it."""
        num_tokens = shape.num_decode_tokens + shape.num_prefill_tokens
        return self.step_time.step_s(float(num_tokens), shape.num_decode_context + shape.num_prefill_context)

    def host_s(self, shape: StepShape) -> float:
        """Return 0."""
        return 0.0


class _Service:
    """Watches a run of one engine: the gap in service between tenants."""

    def __init__(self, workload: Workload) -> None:
        self._numbers = {name: number for number, name in enumerate(sorted({one.tenant for one in workload.requests}))}
        self._tenant_of_slot = np.zeros(256, np.int64)
        self._unserved: dict[int, int] = {}  # prompt tokens of slots without a token so far
        self.gap = ServiceGap(len(self._numbers))

    def added(self, replica: int, slot: int, request: Request) -> None:
        """Note whose request a slot has."""
        if slot >= len(self._tenant_of_slot):
            self._tenant_of_slot = np.resize(self._tenant_of_slot, 2 * slot)
        self._tenant_of_slot[slot] = self._numbers[request.tenant]
        self._unserved[slot] = len(request.prompt_token_ids)
        self.gap.waits(self._numbers[request.tenant])

    def stepped(self, replica: int, deltas: TokenDeltas) -> None:
        """Note who was served."""
        if deltas.slots.size:
            tenants = self._tenant_of_slot[deltas.slots]
            costs: FloatArray = _OUTPUT_PRICE * deltas.num_tokens.astype(np.float64)
            for place, slot in enumerate(deltas.slots.tolist()):
                if slot in self._unserved:
                    costs[place] += _PROMPT_PRICE * self._unserved.pop(slot)
                    self.gap.runs(int(tenants[place]))
            self.gap.serve(tenants, costs)
