"""Caches of their own, host memory beside them, and a pool for all over links of several speeds: four replicas at several rates.

    python examples/gallery/shared_kv/measure.py [--json FILE] [--requests N] [--rates A,B,...] [--only NAME,...]

Differences to `own` are of the same requests, with intervals by the moving-block bootstrap of `trencadis compare`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trencadis.api import load_with_plugins
from trencadis.console import print_table
from trencadis_tools.compare.metrics import metric_of
from trencadis_tools.compare.statistics import MIN_REQUESTS, block_interval
from trencadis_tools.simulation import Run, simulate
from trencadis_tools.simulation.step_times import load_step_times
from trencadis_tools.workloads import Workload, load_workload

__all__ = ["CONFIGURATIONS", "FOLDER", "capacity", "row_of", "served"]

FOLDER = Path(__file__).parent
NUM_REPLICAS = 4
RATES = "1.25,1.5,1.75,2,2.25"
RATE_OF_INTERVALS = 1.75
WITHIN = 0.9
"""Share of requests that keep their objectives at a rate that counts as carried."""

_STORE = "kv_connector.simulated_store"
_SPEED, _SIZE = f"{_STORE}.link_bytes_per_s", f"{_STORE}.capacity_bytes"
CONFIGURATIONS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "own": ("own", {}),
    "affinity": ("affinity", {}),
    "host": ("host", {}),
    "host_large": ("host", {_SIZE: 512 << 30}),
    "pool_190": ("pool", {}),
    "pool_87": ("pool", {_SPEED: 87e9 / 8}),
    "pool_tcp": ("pool", {_SPEED: 87e9 / 2.4 / 8}),
    "pool_10g": ("pool", {_SPEED: 1.25e9}),
    "pool_10g_always": ("pool", {_SPEED: 1.25e9, "kv_policy.name": "always"}),
    "pool_large": ("pool", {_SIZE: 4 << 40}),
}
"""By name: a file, and what is set in addition."""


def served(name: str, workload: Workload) -> Run:
    """Return the run of a configuration."""
    file, more = CONFIGURATIONS[name]
    resolved, registry = load_with_plugins(file=FOLDER / f"{file}.toml", environ={}, overrides=dict(more))
    step_times = load_step_times("a100:llama_3_1_8b")
    return simulate(resolved.config, registry, workload, step_times=step_times, replicas=NUM_REPLICAS)


def row_of(name: str, rate: float, run: Run, own: Run | None) -> dict[str, Any]:
    """Return the numbers of a run, and its difference to that of `own` at the same rate."""
    ttft, slo = metric_of("ttft_mean").values(run), metric_of("slo_attainment").values(run)
    kv = run.kv
    row = {
        "name": name,
        "rate": rate,
        "hit_ratio": run.num_prompt_tokens_cached / run.num_prompt_tokens_admitted,
        "ttft_mean": float(ttft.mean()),
        "ttft_p99": float(np.quantile(ttft, 0.99)),
        "within_targets": float(slo.mean()),
        "num_loads": 0 if kv is None else kv.num_loads,
        "num_late_loads": 0 if kv is None else kv.num_late_loads,
        "num_declined_loads": 0 if kv is None else kv.num_declined_loads,
        "load_mean": 0.0 if kv is None else kv.load_s / max(1, kv.num_loads),
        "saved_tokens": 0 if kv is None else kv.num_tokens_saved,
        "dropped_tokens": 0 if kv is None else kv.num_tokens_dropped,
        "link_busy": 0.0 if kv is None else kv.link_busy_s / run.duration_s / NUM_REPLICAS,
    }
    if own is not None and run is not own and rate == RATE_OF_INTERVALS and len(ttft) >= MIN_REQUESTS:
        for metric, values in (("ttft_mean", ttft), ("slo_attainment", slo)):
            interval = block_interval(metric_of(metric).values(own), values)
            row |= {f"{metric}_low": interval.low, f"{metric}_high": interval.high}
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}


def capacity(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    """Return the rate at which the share within objectives falls to `WITHIN`, on the line between two measured ones; nan: beyond them. Pure."""
    points = [(row["rate"], row["within_targets"]) for row in rows if row["name"] == name]
    for (low, above), (high, below) in itertools.pairwise(points):
        if above >= WITHIN > below:
            return float(low + (high - low) * (above - WITHIN) / (above - below))
    return float("nan")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows")
    parser.add_argument("--requests", type=int, metavar="N", help="the first N (default: those of the workload file)")
    parser.add_argument(
        "--rates", default=RATES, metavar="A,B,...", help=f"requests a second, ascending (default: {RATES})"
    )
    parser.add_argument("--only", default=",".join(CONFIGURATIONS), metavar="NAME,...", help="of the configurations")
    args = parser.parse_args()
    logging.getLogger("trencadis.engine").setLevel(logging.WARNING)
    names, rows = args.only.split(","), []
    for rate in map(float, args.rates.split(",")):
        workload = load_workload(str(FOLDER / "conversation.toml"), rate=rate, limit=args.requests)
        runs = {name: served(name, workload) for name in names}
        rows += [row_of(name, rate, run, runs.get("own")) for name, run in runs.items()]
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    print_table(tuple(rows[-1]), [tuple(str(row.get(key, "")) for key in rows[-1]) for row in rows])
    print_table(
        ("name", f"rate with {WITHIN:.0%} within objectives"),
        [(name, f"{capacity(rows, name):.2f}") for name in names],
    )


if __name__ == "__main__":
    main()
