"""Caches of their own against one for all: four replicas, and one engine on their four devices.

    python examples/gallery/shared_kv/measure.py [--json FILE] [--requests N] [--rate R]

Differences to `own` are of the same requests, with intervals by the moving-block bootstrap of `trencadis compare`.
"""

from __future__ import annotations

import argparse
import json
import logging
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

FOLDER = Path(__file__).parent
CONFIGURATIONS = {"own": 4, "affinity": 4, "affinity_large": 4, "pool": 1}
"""Replicas of each; those of one replica run on four devices."""


def served(name: str, workload: Workload) -> Run:
    """Return the run of a configuration."""
    resolved, registry = load_with_plugins(file=FOLDER / f"{name}.toml", environ={})
    replicas = CONFIGURATIONS[name]
    step_times = load_step_times(f"a100:llama_3_1_8b:tp{4 // replicas}")
    return simulate(resolved.config, registry, workload, step_times=step_times, replicas=replicas)


def row_of(name: str, run: Run, own: Run) -> dict[str, Any]:
    """Return the numbers of a run, and its difference to another one."""
    ttft, slo = metric_of("ttft_mean").values(run), metric_of("slo_attainment").values(run)
    row = {
        "name": name,
        "hit_ratio": run.num_prompt_tokens_cached / run.num_prompt_tokens_admitted,
        "ttft_mean": float(ttft.mean()),
        "ttft_p99": float(np.quantile(ttft, 0.99)),
        "within_targets": float(slo.mean()),
    }
    if run is not own and len(ttft) >= MIN_REQUESTS:
        for metric, values in (("ttft_mean", ttft), ("slo_attainment", slo)):
            interval = block_interval(metric_of(metric).values(own), values)
            row |= {f"{metric}_low": interval.low, f"{metric}_high": interval.high}
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows")
    parser.add_argument("--requests", type=int, metavar="N", help="the first N (default: those of the workload file)")
    parser.add_argument("--rate", type=float, default=1.75, metavar="R", help="requests a second (default: 1.75)")
    args = parser.parse_args()
    logging.getLogger("trencadis.engine").setLevel(logging.WARNING)
    workload = load_workload(str(FOLDER / "conversation.toml"), rate=args.rate, limit=args.requests)
    runs = {name: served(name, workload) for name in CONFIGURATIONS}
    rows = [row_of(name, run, runs["own"]) for name, run in runs.items()]
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    print_table(tuple(rows[-1]), [tuple(str(row.get(key, "")) for key in rows[-1]) for row in rows])


if __name__ == "__main__":
    main()
