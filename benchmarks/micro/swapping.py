"""What preemption by swap saves: each workload twice on the simulated device, recomputed and swapped, under growing KV pressure.

    python benchmarks/micro/swapping.py [--json]

The same engine, policies and requests; the device computes a step in ``StepTime`` and copies a block at 20 GB/s each way. Simulated
time is exact, so one run of each is enough.
"""

from __future__ import annotations

import argparse
import json
import random
from typing import Any

import attrs

from trencadis.config import Config
from trencadis.registry import Registry, load_with_plugins
from trencadis_tools.bench import ScheduleWorkload, measure_schedule
from trencadis_tools.workloads import Workload, WorkloadRequest

NUM_BLOCKS = (2400, 1200, 800)
POLICIES = ("fcfs", "prefill_first", "priority, preempt")
WAYS = ("recompute", "swap")


def workload() -> Workload:
    """Return 400 requests, four a second, prompts of 50 to 1,500 and outputs of 20 to 600 tokens."""
    rng = random.Random(0)
    found, at_s = [], 0.0
    for _ in range(400):
        at_s += rng.expovariate(4.0)
        sizes = {"num_prompt_tokens": rng.randint(50, 1500), "num_output_tokens": rng.randint(20, 600)}
        found.append(WorkloadRequest(request_id=str(len(found)), arrival_s=at_s, **sizes))
    return ScheduleWorkload().complete(Workload(name="preemptions", requests=tuple(found)))


def with_options(config: Config, policy: str, preemption: str) -> Config:
    """Return the config of one run."""
    components = dict(config.scheduling.components)
    if "preempt" in policy:
        components["priority"] = attrs.evolve(components["priority"], preempt=True)
    return attrs.evolve(
        config,
        scheduling=attrs.evolve(config.scheduling, components=components),
        engine=attrs.evolve(config.engine, preemption=preemption, max_wait_s=1e9),
    )


def pairs(config: Config, registry: Registry) -> list[dict[str, Any]]:
    """Return both results of every policy and cache size."""
    todo, rows = workload(), []
    for num_blocks in NUM_BLOCKS:
        for policy in POLICIES:
            row: dict[str, Any] = {"policy": policy, "num_blocks": num_blocks}
            for way in WAYS:
                chosen = with_options(config, policy, way)
                found = measure_schedule(chosen, registry, todo, policy=policy.partition(",")[0], num_blocks=num_blocks)
                row[way] = {
                    name: getattr(found, name)
                    for name in ("num_preempted", "recompute_ratio", "e2e_mean_s", "e2e_p99_s", "urgent_ttft_p99_s")
                }
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    resolved, registry = load_with_plugins(environ={})
    result = {"pairs": pairs(resolved.config, registry)}
    if args.json:
        print(json.dumps(result, indent=2))
        return
    for row in result["pairs"]:
        print(f"{row['policy']:18} {row['num_blocks']:5} blocks")
        for way in WAYS:
            print(
                "    {way:10} {num_preempted:4} preempted, tax {recompute_ratio:.4f}, E2E {e2e_mean_s:.2f} s, "
                "p99 {e2e_p99_s:.1f} s, urgent TTFT p99 {urgent_ttft_p99_s:.2f} s".format(way=way, **row[way])
            )


if __name__ == "__main__":
    main()
