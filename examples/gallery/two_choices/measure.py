"""Mean times of requests with one and with two choices, against formulas of queueing theory, and under bursts.

    python examples/gallery/two_choices/measure.py [--json FILE] [--requests N] [--seeds N]

A replica is a queue of the textbook: one request at a time, first come, first served, answers of exponential length. The real routers are
in front of it. Times are in mean services, which take one second.

Sources: Mitzenmacher, "The power of two choices in randomized load balancing", 2001, and Vvedenskaya, Dobrushin and Karpelevich, 1996, for
two choices; for turns the queue with Erlang arrivals, as in Kleinrock, "Queueing systems", 1975, volume 1, chapter 6.
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np

from trencadis.api import Config, Registry, load_with_plugins
from trencadis.console import print_table
from trencadis.records import FloatArray
from trencadis_tools.compare.statistics import run_interval
from trencadis_tools.simulation import simulate
from trencadis_tools.simulation.step_times import load_step_times
from trencadis_tools.workloads import load_workload

FOLDER = Path(__file__).parent
ROUTERS = {
    "random": "examples.gallery.two_choices.random_choice:RandomChoice",
    "round_robin": "round_robin",
    "power_of_two": "power_of_two",
    "least_loaded": "least_loaded",
}
NUM_REPLICAS = 50
LOADS = (0.5, 0.8)
WARM_UP = 0.2
"""Share of the requests that are not counted: replicas are empty at the start."""


def one_choice(load: float) -> float:
    """Return the mean time of a replica drawn at random, M/M/1. Pure."""
    return 1 / (1 - load)


def turns(load: float, num_replicas: int) -> float:
    """Return the mean time of replicas in turns, each a queue with Erlang arrivals, E_n/M/1. Pure."""
    sigma = 0.0
    for _ in range(10_000):
        sigma = (num_replicas * load / (num_replicas * load + 1 - sigma)) ** num_replicas
    return 1 / (1 - sigma)


def two_choices(load: float) -> float:
    """Return the mean time of the shorter of two queues drawn at random, as the number of replicas grows without end. Pure."""
    return sum((load ** (2.0**i - 2) for i in range(1, 60)), 0.0)


def one_queue(load: float, num_replicas: int) -> float:
    """Return the mean time of one queue for all replicas, M/M/c by Erlang's C, which no router can be below. Pure."""
    blocked = 1.0
    for servers in range(1, num_replicas + 1):
        blocked = load * num_replicas * blocked / (servers + load * num_replicas * blocked)
    waits = blocked / (1 - load * (1 - blocked))
    return 1 + waits / (num_replicas * (1 - load))


def loaded(router: str) -> tuple[Config, Registry]:
    """Return the configuration of the replicas behind a router."""
    resolved, registry = load_with_plugins(
        file=FOLDER / "config.toml", environ={}, overrides={"router.name": ROUTERS[router]}
    )
    return resolved.config, registry


def times(router: str, workload: str, *, num_replicas: int, seed: int, **more: Any) -> FloatArray:
    """Return the time of every request of a run, from sent to the last token, seconds ``[num_requests]``."""
    config, registry = loaded(router)
    requests = load_workload(str(FOLDER / f"{workload}.toml"), seed=seed, **more)
    step_times = load_step_times(str(FOLDER / "service.json"))
    run = simulate(config, registry, requests, step_times=step_times, replicas=num_replicas)
    return np.array([record.e2e_s for record in run.records])


def formulas(load: float, num_replicas: int) -> dict[str, float]:
    """Return what is expected of each router. Pure."""
    return {
        "random": one_choice(load),
        "round_robin": turns(load, num_replicas),
        "power_of_two": two_choices(load),
        "least_loaded": one_queue(load, num_replicas),
    }


def steady(num_requests: int) -> list[dict[str, Any]]:
    """Return a row for each load and router: what came and what is expected."""
    rows = []
    for load in LOADS:
        expected = formulas(load, NUM_REPLICAS)
        for router in ROUTERS:
            found = times(
                router, "poisson", num_replicas=NUM_REPLICAS, seed=0, rate=load * NUM_REPLICAS, limit=num_requests
            )[int(WARM_UP * num_requests) :]
            mean, p99 = float(found.mean()), float(np.quantile(found, 0.99))
            row = {"load": load, "router": router, "mean": mean, "p99": p99, "formula": expected[router]}
            rows.append({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()})
    return rows


def bursts(num_seeds: int, limit: int | None = None) -> list[dict[str, Any]]:
    """Return a row for each router: means over seeds, and the paired difference to random."""
    found = {
        router: [
            times(router, "bursts", num_replicas=NUM_REPLICAS, seed=seed, limit=limit) for seed in range(num_seeds)
        ]
        for router in ROUTERS
    }
    rows = []
    for router, runs in found.items():
        means, p99s = (np.array([statistic(run) for run in runs]) for statistic in (np.mean, _p99))
        row = {"router": router, "mean": float(means.mean()), "p99": float(p99s.mean())}
        for name, values, statistic in (("mean", means, np.mean), ("p99", p99s, _p99)):
            baseline = np.array([statistic(run) for run in found["random"]])
            interval = run_interval(values - baseline)
            row |= {
                f"{name}_difference": interval.difference,
                f"{name}_low": interval.low,
                f"{name}_high": interval.high,
            }
        rows.append({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()})
    return rows


def _p99(values: FloatArray) -> float:
    return float(np.quantile(values, 0.99))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows")
    parser.add_argument("--requests", type=int, default=20_000, metavar="N", help="of each steady run (default: 20000)")
    parser.add_argument("--seeds", type=int, default=4, metavar="N", help="runs under bursts (default: 4)")
    args = parser.parse_args()
    logging.getLogger("trencadis.engine").setLevel(logging.WARNING)
    result = {"steady": steady(args.requests), "bursts": bursts(args.seeds)}
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    for rows in result.values():
        print_table(tuple(rows[0]), [tuple(str(value) for value in row.values()) for row in rows])


if __name__ == "__main__":
    main()
