"""The simulator against this machine: step times fitted on one workload, another workload predicted, then served by the real engine.

    nice -n 10 python benchmarks/validation/simulator_cpu.py --json > benchmarks/results/simulator_cpu.json

A random Llama serves requests in this process. Its step times are fitted on a workload whose rate grows (A). Of another one, with longer
prompts and shorter answers (B), the simulator predicts what comes at 30, 60, 90 and 110 % of the capacity that it computes, and under
which policies requests wait how long; the real engine serves the same requests several times: what live runs differ by is what no
prediction can be better than. Both know the lengths of answers only when they end.

The clock counts CPU seconds of this process: one thread computes, steps do not overlap, and idle time is skipped. So what neighbours on
the machine take is not measured. But with ten processes on two cores a CPU second is worth up to a third less at times, for caches and
hyper-threads are shared. Therefore a small computation of the same kind runs after every step, outside of the clock, and CPU seconds
count in proportion to its speed of late: the clock shows what a thread of constant speed would take. ``--plain-clock`` leaves that out.
The memory of the KV cache is taken at the start of an engine: a step that writes to new pages takes several times as long as the same
step later (``benchmarks/serve/prefault.py``). The observer ``recorder`` is on in every live run. No run of B is used for its prediction.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "micro"))

from machine import describe
from random_models import save_random_model

from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Component, Observer
from trencadis.records import StepStats
from trencadis.registry import load_with_plugins
from trencadis_tools.compare.candidates import Candidate
from trencadis_tools.compare.live import LiveRuns
from trencadis_tools.lab import scipy_stats
from trencadis_tools.simulation import Run, simulate
from trencadis_tools.simulation.step_times import (
    Fit,
    LinearStepTimes,
    StepRecord,
    fit_step_times,
    read_records,
    steady,
    step_time_errors,
)
from trencadis_tools.workloads import Workload, WorkloadRequest

MODEL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 0,
}
LOADS = (0.3, 0.6, 0.9, 1.1)
NUM_FIT_ROUNDS = 6
"""Live runs of the workload that is fitted and of each load."""
POLICIES = ("fcfs", "shortest_first", "prefill_first", "fair_share", "multi_level", "priority", "deadline")
POLICY_LOAD = 1.3
NUM_ROUNDS = 6
"""Live runs of each policy."""

_NUM_RECENT = 25
"""Measurements of the machine's speed that count, the median of them."""


class CpuClock:
    """Counts CPU seconds of this process, all threads together, at constant speed, and what was skipped.

    Args:
        measures_speed: Let :meth:`measure` change what a CPU second counts.

    Attributes:
        rates: What a CPU second counted, measurement by measurement.
    """

    def __init__(self, *, measures_speed: bool) -> None:
        self._measures_speed = measures_speed
        self._now_s, self._seen_s = 0.0, time.process_time()
        self._rate = 1.0
        self._recent: deque[float] = deque(maxlen=_NUM_RECENT)
        self._nominal_s = 0.0
        rng = np.random.default_rng(0)
        self._left, self._right = (
            torch.tensor(rng.standard_normal(shape), dtype=torch.float32) for shape in ((8, 256), (256, 704))
        )
        self.rates: list[float] = []

    def now_s(self) -> float:
        """Return the sum, seconds."""
        seen_s = time.process_time()
        self._now_s += (seen_s - self._seen_s) * self._rate
        self._seen_s = seen_s
        return self._now_s

    def skip(self, seconds: float) -> None:
        """Go on as if so much idle time had passed."""
        self._now_s = self.now_s() + seconds

    def measure(self) -> None:
        """Measure the speed of the machine; takes no time of this clock."""
        if not self._measures_speed:
            return
        self.now_s()
        for _ in range(12):
            (self._left @ self._right).sum().item()
        end_s = time.process_time()
        self._recent.append(end_s - self._seen_s)
        self._seen_s = end_s
        took_s = statistics.median(self._recent)
        if len(self._recent) < _NUM_RECENT:
            return
        self._nominal_s = self._nominal_s or took_s
        self._rate = self._nominal_s / took_s
        self.rates.append(self._rate)


class Speed(Observer):
    """Measures the speed of the machine after every step."""

    def __init__(self, clock: CpuClock) -> None:
        self._clock = clock

    def on_step(self, stats: StepStats) -> None:
        """Measure it."""
        self._clock.measure()


class SpeedPlugin:
    """Offers the observer ``speed``."""

    def __init__(self, clock: CpuClock) -> None:
        self._clock = clock

    @hookimpl
    def trencadis_observers(self) -> list[Component]:
        """Yield it."""
        return [
            Component(
                name="speed",
                factory=lambda _, __: Speed(self._clock),
                summary="Measures the speed of the machine.",
                interface_version=1,
            )
        ]


@attrs.frozen(kw_only=True)
class Lengths:
    """Means and coefficients of variation of lognormal lengths, tokens."""

    prompt: float
    output: float
    cv: float = 0.8

    def draw(self, rng: np.random.Generator) -> tuple[int, int]:
        """Return the lengths of one request."""
        sigma = float(np.sqrt(np.log(1 + self.cv**2)))
        prompt, output = (
            mean * np.exp(sigma * rng.standard_normal() - sigma**2 / 2) for mean in (self.prompt, self.output)
        )
        return int(np.clip(prompt, 4, 1500)), int(np.clip(output, 1, 400))


FIT_LENGTHS, OTHER_LENGTHS = Lengths(prompt=240, output=40, cv=1.2), Lengths(prompt=240, output=24)


def workload(name: str, lengths: Lengths, num_requests: int, gap_s: Callable[[int], float], *, seed: int) -> Workload:
    """Return requests with exponential gaps; the draws of a request depend on seed and number alone, so loads see the same requests."""
    requests, arrival_s = [], 0.0
    for index in range(num_requests):
        rng = np.random.default_rng((seed, index))
        arrival_s += gap_s(index) * rng.standard_exponential()
        prompt, output = lengths.draw(rng)
        requests.append(
            WorkloadRequest(
                request_id=f"{name}-{index}",
                arrival_s=arrival_s,
                num_prompt_tokens=prompt,
                num_output_tokens=output,
                tenant=str(int(rng.integers(3))),
                priority=int(rng.integers(3)),
                ttft_target_s=float(rng.choice([0.5, 2.0, 8.0])),
            )
        )
    return Workload(name=name, requests=tuple(requests), seed=seed)


class Laboratory:
    """Runs workloads on the real engine and on simulated ones of the same configuration.

    Args:
        model: Directory of the model.
        folder: For records of steps.
        clock: Of live runs.
    """

    def __init__(self, model: Path, folder: Path, clock: CpuClock) -> None:
        self._model, self._folder = model, folder
        self._clock = clock
        self._num_live = 0

    def _candidate(self, policy: str, records: Path, *, prefault_cache: bool = True) -> Candidate:
        given = {
            "model.path": str(self._model),
            "engine.async_scheduling": False,
            "engine.max_num_seqs": 32,
            "engine.max_num_batched_tokens": 256,
            "cache.num_blocks": 4096,
            "cache.block_size": 16,
            "backend.torch.num_threads": 1,
            "backend.torch.prefault_cache": prefault_cache,
            "scheduling.name": policy,
            "observer.names": ["recorder", "speed"],
            "observer.recorder.file": str(records),
            "log.level": "error",
        }
        resolved, registry = load_with_plugins(overrides=given, environ={}, extra_plugins=[SpeedPlugin(self._clock)])
        return Candidate(name=policy, config=resolved.config, registry=registry, given=given, plan_hash="")

    def live(self, asked: Workload, policy: str = "fcfs", *, prefault_cache: bool = True) -> tuple[Run, Path]:
        """Return a run of the real engine, and the records of its steps."""
        records = self._folder / f"{self._num_live}.jsonl"
        self._num_live += 1
        candidate = self._candidate(policy, records, prefault_cache=prefault_cache)
        with LiveRuns(clock=self._clock, wait=self._clock.skip) as runs:
            (run,) = runs([candidate], asked, 0)
        return run, records

    def simulated(self, asked: Workload, times: LinearStepTimes, policy: str = "fcfs") -> Run:
        """Return a run of the simulated engine."""
        candidate = self._candidate(policy, self._folder / "none.jsonl")
        return simulate(candidate.config, candidate.registry, asked, step_times=times)


def measures(run: Run) -> dict[str, float]:
    """Return throughput and latencies of a run."""
    ttfts = [one.ttft_s for one in run.records]
    tpots = [one.tpot_s for one in run.records if one.num_output_tokens > 1]
    return {
        "output_tokens_per_s": sum(one.num_output_tokens for one in run.records) / run.duration_s,
        "ttft_mean_s": statistics.fmean(ttfts),
        "ttft_p50_s": statistics.median(ttfts),
        "ttft_p99_s": float(np.percentile(ttfts, 99)),
        "tpot_mean_s": statistics.fmean(tpots),
        "tpot_p99_s": float(np.percentile(tpots, 99)),
        "e2e_mean_s": statistics.fmean(one.e2e_s for one in run.records),
        "num_steps": run.num_steps,
    }


def beside(live: list[Run], simulated: Run) -> dict[str, Any]:
    """Return the measures of both, relative errors of the simulated one, and by how much live runs differ, as a part of their mean.

    ``ttft_difference`` has quantiles of what requests had live beyond what was simulated, seconds: a mean may be that of a few steps which
    something else on the machine delayed.
    """
    every, predicted = [measures(run) for run in live], measures(simulated)
    measured = {name: statistics.fmean(one[name] for one in every) for name in predicted}
    errors = {name: predicted[name] / measured[name] - 1 for name in measured}
    spread = {name: statistics.stdev(one[name] for one in every) / measured[name] for name in measured}
    beyond = [
        ours.ttft_s - theirs.ttft_s for run in live for ours, theirs in zip(run.records, simulated.records, strict=True)
    ]
    quantiles = {str(part): float(np.percentile(beyond, part)) for part in (5, 25, 50, 75, 95, 99)}
    return {
        "live": measured,
        "simulated": predicted,
        "errors": errors,
        "spread": spread,
        "ttft_difference": quantiles,
    }


def fit_workload(num_requests: int) -> Workload:
    """Return workload A, whose rate grows from little to more than can be served."""
    return workload("a", FIT_LENGTHS, num_requests, lambda index: 0.1 * (1 - 0.95 * index / num_requests), seed=1)


def load_workload(load: float, capacity: float, num_requests: int) -> Workload:
    """Return workload B at a load, a part of the capacity in requests a second."""
    return workload("b", OTHER_LENGTHS, num_requests, lambda _: 1 / (load * capacity), seed=2)


def fitted(paths: list[Path]) -> tuple[LinearStepTimes, Fit, list[StepRecord]]:
    """Return step times fitted on records of workload A, and the steps."""
    steps = [step for path in paths for step in steady(read_records(path).steps, num_warm_up=20)]
    fit = fit_step_times(steps, robust=False)
    assert isinstance(fit.times, LinearStepTimes)
    return fit.times, fit, steps


def loads(lab: Laboratory, num_requests: int) -> tuple[LinearStepTimes, float, dict[str, Any]]:
    """Return fitted step times, the capacity that they say, requests a second, and predictions of workload B beside measurements.

    Workload A and all loads of B are served in turns, so that what slows the machine for minutes is in the fit as in what it predicts.
    The capacity that loads are parts of is that of a fit on a first run of A.
    """
    asked = fit_workload(num_requests)
    full = workload("b", OTHER_LENGTHS, num_requests, lambda _: 0.0, seed=2)
    capacity = num_requests / lab.simulated(full, fitted([lab.live(asked)[1]])[0]).duration_s
    runs_of_a = []
    runs_of_b: dict[float, list[tuple[Run, Path]]] = {load: [] for load in LOADS}
    for _ in range(NUM_FIT_ROUNDS):
        runs_of_a.append(lab.live(asked))
        for load, runs in runs_of_b.items():
            runs.append(lab.live(load_workload(load, capacity, num_requests)))
    times, fit, steps = fitted([records for _, records in runs_of_a])
    told: dict[str, Any] = {
        "fit": {
            "coefficients": {name: attrs.asdict(one) for name, one in fit.coefficients.items()},
            "num_steps": fit.num_steps,
            "same_workload": beside([run for run, _ in runs_of_a], lab.simulated(asked, times)),
            "same_steps": {kind: attrs.asdict(one) for kind, one in step_time_errors(times, steps).items()},
        },
        "capacity_requests_per_s": capacity,
        "loads": {},
    }
    _say("same workload", told["fit"]["same_workload"]["errors"])
    for load, runs in runs_of_b.items():
        steps = [step for _, path in runs for step in steady(read_records(path).steps, num_warm_up=20)]
        errors = {kind: attrs.asdict(one) for kind, one in step_time_errors(times, steps).items()}
        predicted = lab.simulated(load_workload(load, capacity, num_requests), times)
        told["loads"][str(load)] = {**beside([run for run, _ in runs], predicted), "steps": errors}
        _say(f"load {load}", told["loads"][str(load)]["errors"] | {"steps": errors["all"]["step_sum"]})
        _say(f"load {load}, spread of live runs", told["loads"][str(load)]["spread"])
    return times, capacity, told


def orders(lab: Laboratory, times: LinearStepTimes, num_requests: int, capacity: float) -> dict[str, Any]:
    """Return mean times under several policies, simulated and live, and how far their orders agree (Kendall's tau).

    Policies are served in turns, so that what slows the machine for a while slows all of them. Policies that do not look at lengths
    have nearly the same means, for which of two waits makes no difference to the sum: of such a pair no number of runs tells an order.
    Therefore tau is computed of all pairs, and of those that the live runs tell apart.
    """
    asked = workload("b", OTHER_LENGTHS, num_requests, lambda _: 1 / (POLICY_LOAD * capacity), seed=3)
    names = ("ttft_mean_s", "tpot_mean_s", "e2e_mean_s")
    rounds: list[dict[str, dict[str, float]]] = []
    for number in range(NUM_ROUNDS):
        turn = POLICIES[number:] + POLICIES[:number]
        rounds.append({policy: measures(lab.live(asked, policy)[0]) for policy in turn})
        _say(f"round {number}", {policy: rounds[-1][policy]["ttft_mean_s"] for policy in POLICIES})
    simulated = {policy: measures(lab.simulated(asked, times, policy)) for policy in POLICIES}
    live = {
        policy: {name: statistics.fmean(one[policy][name] for one in rounds) for name in names} for policy in POLICIES
    }
    found: dict[str, Any] = {
        "load": POLICY_LOAD,
        "num_rounds": NUM_ROUNDS,
        "agreement": {name: agreement(rounds, simulated, name) for name in names},
        "policies": {policy: {"live": live[policy], "simulated": simulated[policy]} for policy in POLICIES},
        "rounds": rounds,
    }
    for name in names:
        _say(f"order by {name}", found["agreement"][name])
    return found


def agreement(
    rounds: list[dict[str, dict[str, float]]], simulated: dict[str, dict[str, float]], name: str
) -> dict[str, float]:
    """Return Kendall's tau of the simulated order and that of live means, and the same of live halves.

    ``told_apart`` are pairs of policies whose difference has one sign in a 95 % interval of Student's t over rounds; ``tau_told_apart``
    is the share of these that the simulator orders alike, less the share that it does not.
    """
    stats = scipy_stats()
    live = {policy: [one[policy][name] for one in rounds] for policy in POLICIES}

    def tau(some: list[float], others: list[float]) -> float:
        return float(stats.kendalltau(some, others)[0])

    def means(part: slice) -> list[float]:
        return [statistics.fmean(live[policy][part]) for policy in POLICIES]

    alike = []
    for first, second in itertools.combinations(POLICIES, 2):
        differences = [a - b for a, b in zip(live[first], live[second], strict=True)]
        error = statistics.stdev(differences) / len(differences) ** 0.5
        if abs(statistics.fmean(differences)) > float(stats.t.ppf(0.975, len(differences) - 1)) * error:
            predicted = simulated[first][name] - simulated[second][name]
            alike.append(1 if predicted * statistics.fmean(differences) > 0 else -1)
    return {
        "tau": tau(means(slice(None)), [simulated[policy][name] for policy in POLICIES]),
        "tau_of_live_halves": tau(means(slice(0, None, 2)), means(slice(1, None, 2))),
        "told_apart": len(alike),
        "pairs": len(POLICIES) * (len(POLICIES) - 1) // 2,
        "tau_told_apart": statistics.fmean(alike) if alike else float("nan"),
    }


def _say(what: str, values: dict[str, float]) -> None:
    print(what, {name: round(value, 3) for name, value in values.items()}, file=sys.stderr, flush=True)


@contextmanager
def laboratory(clock: CpuClock) -> Iterator[Laboratory]:
    """Make a model and a place for records."""
    with tempfile.TemporaryDirectory() as folder:
        yield Laboratory(save_random_model(MODEL, Path(folder) / "model"), Path(folder), clock)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200, help="of each run")
    parser.add_argument("--plain-clock", action="store_true", help="CPU seconds as they are")
    parser.add_argument("--no-policies", action="store_true", help="leave the order of policies out")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    load_before = os.getloadavg()
    torch.set_num_threads(1)
    clock = CpuClock(measures_speed=not args.plain_clock)
    for _ in range(200):
        clock.measure()
    with laboratory(clock) as lab:
        times, capacity, found = loads(lab, args.requests)
        result: dict[str, Any] = {
            "machine": describe(),
            "model": MODEL,
            "num_requests": args.requests,
            **found,
        }
        if not args.no_policies:
            result["policies"] = orders(lab, times, args.requests, capacity)
    if clock.rates:
        result["speed"] = {str(part): round(float(np.percentile(clock.rates, part)), 3) for part in (1, 25, 50, 75, 99)}
    result["load_average"] = {"before": load_before, "after": os.getloadavg()}
    if args.json:
        print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
