"""What scheduling policies cost: microseconds per step and per candidate over first come, first served; long queues; victims.

    python benchmarks/micro/scheduling.py [--json]

An engine on the fake backend has 256 running and 4,096 waiting sequences of four tenants and no block to admit anybody with, so
that every step asks for the whole order in vain. Timed are the calls of a step (split and order; preempt_for where a policy preempts)
on its view, those of first come, first served twice: the second time is the noise floor (A/A). Then whole steps of the engine with 4,096
and with 100,000 waiting, all of them in time, and all of them starved. Last, the recompute tax of each choice of victim on a simulated
device whose cache is short. Times are CPU times.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import attrs

from trencadis.clock import SimulatedClock
from trencadis.interfaces import ComponentContext, SchedulingPolicy
from trencadis.records import Request, SamplingParams
from trencadis.registry import Registry, load_with_plugins
from trencadis_testing.engines import make_engine
from trencadis_testing.fakes import FakeBackend
from trencadis_tools.bench import ScheduleWorkload, measure_schedule
from trencadis_tools.workloads import Workload, WorkloadRequest

RUNNING, WAITING = 256, 4096


def policies(registry: Registry) -> dict[str, Callable[[], SchedulingPolicy]]:
    """Return what makes each built-in policy, and two that preempt."""
    components = registry.components("scheduling")

    def make(name: str, **options: Any) -> SchedulingPolicy:
        context = ComponentContext(clock=SimulatedClock(), seed=0, make=lambda _, inner: make(inner))
        policy: SchedulingPolicy = registry.build(
            components[name], components[name].component.config(**options), context
        )
        return policy

    made: dict[str, Callable[[], SchedulingPolicy]] = {
        name: (lambda name=name: make(name))
        for name in components  # type: ignore[misc]
    }
    made["fcfs, target"] = lambda: make("fcfs", tpot_target_ms=50.0)
    made["fair_share of shortest_first"] = lambda: make("fair_share", inner="shortest_first")
    made["fcfs, again (A/A)"] = lambda: make("fcfs")
    made["priority, preempt"] = lambda: make("priority", preempt=True)
    made["multi_level, preempt"] = lambda: make("multi_level", preempt=True)
    return made


def build(policy: SchedulingPolicy, *, num_waiting: int) -> Any:
    """Return an engine whose rows are free and whose blocks are all taken."""
    rng = random.Random(0)
    engine = make_engine(
        policy=policy,
        backend=FakeBackend(strict=False, eos=-1, max_model_len=4096),
        num_blocks=RUNNING * 16,
        block_size=16,
        max_num_seqs=RUNNING + 8,
        max_num_batched_tokens=1 << 20,
        max_preemptions=1,
    )
    params = SamplingParams(max_tokens=3000, temperature=0)
    for number in range(RUNNING + num_waiting):
        length = 241 if number < RUNNING else rng.randint(40, 600)
        prompt = tuple((number * 7 + i) % 97 for i in range(length))
        engine.add(
            Request(
                request_id=str(number),
                prompt_token_ids=prompt,
                params=params,
                priority=0 if number < RUNNING else rng.randint(1, 5),
                tenant=str(number % 4),
            )
        )
        if number == RUNNING - 1:
            engine.step()
    return engine


def call_us(policy: SchedulingPolicy, view: Any) -> float:
    """Return the time of the calls of one step, microseconds: the least of many, as noise only adds."""
    times = []
    for _ in range(60):
        start_ns = time.process_time_ns()
        policy.split(view, token_budget=8192)
        order = policy.order(view)
        if policy.preempts:
            policy.preempt_for(view, slot=int(order[0]), candidates=view.running)
        times.append(time.process_time_ns() - start_ns)
    return min(times) / 1e3


def step_us(engine: Any) -> float:
    """Return the time of the engine's steps while nobody can be admitted, microseconds.

    An order of 100,000 stands for 24 steps: the mean of as many, and the median of seven such means.
    """
    means = []
    for _ in range(8):
        start_ns = time.process_time_ns()
        for _ in range(24):
            engine.step()
        means.append((time.process_time_ns() - start_ns) / 24)
    return statistics.median(means[1:]) / 1e3


def alike_us(registry: Registry) -> dict[str, float]:
    """Return what ``prefix_affinity`` takes per waiting sequence when the cache changes before every call, microseconds.

    All waiting prompts begin with one of 64 system prompts, and one of these is lost or found again before each call: a 64th of
    the queue is looked up.
    """
    engine = build(policies(registry)["prefix_affinity"](), num_waiting=WAITING)
    view, state = engine._scheduler._views.view(), engine._state
    hashes = [state.table.sequence(slot).block_hashes for slot in view.waiting.tolist()]
    policy = engine._policy.strategy
    policy.order(view)
    times = []
    for number in range(60):
        for one in hashes[number % 64 :: 64]:
            state.blocks.on_change(one[0])
        start_ns = time.process_time_ns()
        policy.order(view)
        times.append(time.process_time_ns() - start_ns)
    return {"us_per_candidate": statistics.median(times) / 1e3 / WAITING}


def costs(made: dict[str, Callable[[], SchedulingPolicy]]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, make in made.items():
        engine = build(make(), num_waiting=WAITING)
        taken = call_us(engine._policy.strategy, engine._scheduler._views.view())
        base = rows[0]["us"] if rows else taken
        allowed = 5 + 0.5 * WAITING
        rows.append(
            {"policy": name, "us": taken, "over_fcfs_us": taken - base, "us_per_candidate": (taken - base) / WAITING}
        )
        rows[-1]["within"] = taken - base <= allowed
    return rows


def long_queues(made: dict[str, Callable[[], SchedulingPolicy]]) -> list[dict[str, Any]]:
    """Return whole steps with a short and a long queue, for the policies of one name."""
    rows = []
    for name, make in made.items():
        if "," in name or " of " in name:
            continue
        row: dict[str, Any] = {"policy": name}
        for number in (WAITING, 100_000):
            engine = build(make(), num_waiting=number)
            row[f"us_{number}"] = step_us(engine)
            engine._clock.advance(1e6)
            row[f"starved_us_{number}"] = step_us(engine)
        row["ratio"] = row["us_100000"] / row[f"us_{WAITING}"]
        row["starved_ratio"] = row["starved_us_100000"] / row[f"starved_us_{WAITING}"]
        rows.append(row)
    return rows


def recompute_tax(config: Any, registry: Registry) -> list[dict[str, Any]]:
    """Return preemptions and recompute tax of each choice of victim, under KV pressure."""
    rng = random.Random(0)
    asked, at_s = [], 0.0
    for _ in range(400):
        at_s += rng.expovariate(4.0)
        sizes = {"num_prompt_tokens": rng.randint(50, 1500), "num_output_tokens": rng.randint(20, 600)}
        asked.append(WorkloadRequest(request_id=str(len(asked)), arrival_s=at_s, **sizes))
    workload = ScheduleWorkload(shared_prefix=400).complete(Workload(name="victims", requests=tuple(asked)))
    rows = []
    for victim in ("youngest", "least_computed", "cheapest", "lowest_priority"):
        table = attrs.evolve(config.scheduling.components["fcfs"], victim=victim)
        scheduling = attrs.evolve(config.scheduling, components={**config.scheduling.components, "fcfs": table})
        chosen = attrs.evolve(config, scheduling=scheduling, engine=attrs.evolve(config.engine, max_wait_s=1e9))
        result = measure_schedule(chosen, registry, workload, policy="fcfs", num_blocks=1200)
        rows.append(
            {"victim": victim, "num_preempted": result.num_preempted, "recompute_ratio": result.recompute_ratio}
            | {"e2e_mean_s": result.e2e_mean_s}
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    resolved, registry = load_with_plugins(environ={})
    made = policies(registry)
    made = {"fcfs": made.pop("fcfs"), **made}
    result = {
        "costs": costs(made),
        "changing_cache": alike_us(registry),
        "long_queues": long_queues(made),
        "recompute_tax": recompute_tax(resolved.config, registry),
    }
    if args.json:
        print(json.dumps(result, indent=2))
        return
    for row in result["costs"]:
        print("{policy:34} {us:9.1f} us  over fcfs {us_per_candidate:7.4f} us/candidate".format(**row))
    print(
        "prefix_affinity, a 64th looked up again: {us_per_candidate:.4f} us/candidate".format(
            **result["changing_cache"]
        )
    )
    for row in result["long_queues"]:
        print(
            "step of {policy:16} {us_4096:6.0f} us with 4,096 waiting, {us_100000:6.0f} us with 100,000: {ratio:5.2f} times; "
            "all starved: {starved_us_4096:6.0f} us, {starved_us_100000:6.0f} us, {starved_ratio:5.2f} times".format(
                **row
            )
        )
    for row in result["recompute_tax"]:
        print(
            "victim {victim:16} {num_preempted:5} preempted, recompute tax {recompute_ratio:.4f}, E2E {e2e_mean_s:.2f} s".format(
                **row
            )
        )


if __name__ == "__main__":
    main()
