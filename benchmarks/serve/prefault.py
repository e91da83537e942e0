"""First writes to the KV cache: a new engine on the CPU whose memory comes page by page, and one that took it at the start, in turns.

    python benchmarks/serve/prefault.py [--json] [--rounds N]

Each run is an engine of its own that serves the same requests, at 60 % of what it can: workload and clock are those of
``benchmarks/validation/simulator_cpu.py``. Two kinds are the same, for the noise floor.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "micro"))
sys.path.insert(0, str(Path(__file__).parents[1] / "validation"))

from machine import describe
from simulator_cpu import CpuClock, laboratory, load_workload, measures

from trencadis_tools.simulation.step_times import read_records

NUM_REQUESTS = 200
REQUESTS_PER_S = 22.0
KINDS = {"by page": False, "at the start": True, "at the start, again": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    clock = CpuClock(measures_speed=True)
    for _ in range(200):
        clock.measure()
    asked = load_workload(1.0, REQUESTS_PER_S, NUM_REQUESTS)
    rows: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    with laboratory(clock) as lab:
        for number in range(args.rounds):
            names = list(KINDS) if number % 2 else list(reversed(KINDS))
            for name in names:
                run, records = lab.live(asked, prefault_cache=KINDS[name])
                steps_s = [step.busy_s for step in read_records(records).steps if step.shape.num_prefills]
                rows[name].append(measures(run) | {"prefill_step_p99_s": float(np.percentile(steps_s, 99))})
            print(
                number, {name: round(rows[name][-1]["ttft_mean_s"], 4) for name in KINDS}, file=sys.stderr, flush=True
            )
    result: dict[str, Any] = {
        "machine": describe(),
        "rounds": rows,
        "ratios": {
            name: {
                other: ratio([one[name] for one in rows[other]], [one[name] for one in rows["at the start"]])
                for other in KINDS
                if other != "at the start"
            }
            for name in ("ttft_mean_s", "ttft_p99_s", "prefill_step_p99_s", "e2e_mean_s")
        },
    }
    print(json.dumps(result, indent=1) if args.json else json.dumps(result["ratios"], indent=1))


def ratio(some: list[float], others: list[float]) -> dict[str, float]:
    """Return the mean ratio of pairs, and its standard error."""
    ratios = [one / other for one, other in zip(some, others, strict=True)]
    return {"mean": statistics.fmean(ratios), "error": statistics.stdev(ratios) / len(ratios) ** 0.5}


if __name__ == "__main__":
    main()
