"""Latencies of 16 simulated replicas behind Llumnix and what it is compared with.

    python examples/gallery/llumnix/measure.py [--json FILE] [--workload NAME] [--rates A,B,...] [--requests N] [--replicas A,B,...]

Every row is a run; all configurations get the same requests.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trencadis.api import load_with_plugins
from trencadis.console import print_table
from trencadis_tools.simulation import simulate
from trencadis_tools.simulation.step_times import load_step_times
from trencadis_tools.simulation.summary import summary_of
from trencadis_tools.workloads import load_workload

FOLDER = Path(__file__).parent
CONFIGS = ("round_robin", "least_used", "dispatch", "llumnix", "llumnix_waiting", "llumnix_transfer")
STEP_TIMES = "a10:llama_2_7b"


def row_of(
    config: str, workload: str, *, rate: float, num_requests: int, num_replicas: int, seed: int
) -> dict[str, Any]:
    """Return what one run shows, times in seconds."""
    requests = load_workload(str(FOLDER / f"{workload}.toml"), rate=rate, limit=num_requests, seed=seed)
    resolved, registry = load_with_plugins(file=FOLDER / f"{config}.toml", environ={})
    begin_s = time.process_time()
    run = simulate(resolved.config, registry, requests, step_times=load_step_times(STEP_TIMES), replicas=num_replicas)
    cpu_s = time.process_time() - begin_s
    summary = summary_of(run)
    numbers = {
        "ttft_mean": summary.ttft_s.mean,
        "ttft_p99": summary.ttft_s.p99,
        "tpot_p99": summary.tpot_s.p99,
        "e2e_mean": summary.e2e_s.mean,
        "recomputed": summary.recompute_ratio,
    }
    return {
        "workload": workload,
        "rate": rate,
        "replicas": num_replicas,
        "seed": seed,
        "config": config,
        **{name: round(value, 4) for name, value in numbers.items()},
        "preemptions": summary.num_preemptions,
        "moves": summary.num_rebalanced,
        "cpu_s": round(cpu_s, 1),
    }


def rows_of(
    configs: Sequence[str], workload: str, rates: Sequence[float], counts: Sequence[int], seeds: int, num_requests: int
) -> list[dict[str, Any]]:
    """Return a row for each run, and show each as soon as it is there."""
    rows = []
    for rate in rates:
        for num_replicas in counts:
            for seed in range(seeds):
                for config in configs:
                    row = row_of(
                        config, workload, rate=rate, num_requests=num_requests, num_replicas=num_replicas, seed=seed
                    )
                    sys.stderr.write(json.dumps(row) + "\n")
                    rows.append(row)
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows")
    parser.add_argument("--workload", default="sharegpt", metavar="NAME", help="sharegpt or zipf_medium")
    parser.add_argument("--configs", default=",".join(CONFIGS), metavar="A,B,...", help="which of the configurations")
    parser.add_argument("--rates", default="12", metavar="A,B,...", help="requests a second")
    parser.add_argument("--replicas", default="16", metavar="A,B,...", help="how many")
    parser.add_argument("--requests", type=int, default=2500, metavar="N", help="of each run (default: 2500)")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="runs of each (default: 1)")
    args = parser.parse_args()
    logging.getLogger("trencadis.engine").setLevel(logging.WARNING)
    rates, counts = map(float, args.rates.split(",")), map(int, args.replicas.split(","))
    rows = rows_of(args.configs.split(","), args.workload, list(rates), list(counts), args.seeds, args.requests)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print_table(tuple(rows[0]), [tuple(str(value) for value in row.values()) for row in rows])


if __name__ == "__main__":
    main()
