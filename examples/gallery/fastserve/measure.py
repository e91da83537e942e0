"""Skip-join feedback queues against first come, first served while more comes than can be answered.

    python examples/gallery/fastserve/measure.py [--json FILE] [--seeds N] [--num-requests N]

`trencadis compare` has no value for a run whose backlog grows. Here the run is what is measured: how long the requests of a burst take.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

import attrs
import numpy as np

from trencadis.api import load_with_plugins
from trencadis.console import print_table
from trencadis_tools.compare.statistics import run_interval
from trencadis_tools.simulation import Run, simulate
from trencadis_tools.simulation.step_times import LinearStepTimes
from trencadis_tools.workloads import Workload, load_workload

__all__ = ["RATES", "WORKLOADS", "Row", "compare_at", "serve"]

HERE = Path(__file__).parent
WORKLOADS = ("chats", "skewed")
RATES = (3.0, 6.0)


@attrs.frozen(kw_only=True)
class Row:
    """Both policies on the same requests; ratios are first come, first served by feedback queues, geometric means over seeds.

    Attributes:
        workload: Name of its file.
        rate: Requests a second.
        fcfs_s: Mean time from sent to answered, the mean over seeds.
        skip_join_s: The same.
        mean_ratio: Of the mean time.
        mean_low: Lower end of its 95 % interval.
        mean_high: Upper end.
        p90_ratio: Of the 90th percentile of the time.
        p90_low: Lower end of its 95 % interval.
        p90_high: Upper end.
        num_preemptions: Under feedback queues, the mean over seeds.
    """

    workload: str
    rate: float
    fcfs_s: float
    skip_join_s: float
    mean_ratio: float
    mean_low: float
    mean_high: float
    p90_ratio: float
    p90_low: float
    p90_high: float
    num_preemptions: float


def serve(config: str, workload: Workload, **engine: int) -> Run:
    """Serve a workload.

    Args:
        config: Name of a configuration file in this folder.
        workload: The requests.
        engine: Settings of the engine over those of the file.
    """
    resolved, registry = load_with_plugins(file=HERE / f"{config}.toml", environ={}, overrides={"engine": engine})
    return simulate(resolved.config, registry, workload, step_times=LinearStepTimes())


def compare_at(name: str, rate: float, seeds: int, num_requests: int | None = None, **engine: int) -> Row:
    """Serve workloads of several seeds under both policies.

    Args:
        name: One of ``WORKLOADS``.
        rate: Requests a second.
        seeds: Workloads, drawn independently.
        num_requests: Of each; None: all.
        engine: See :func:`serve`.
    """
    loads = [
        load_workload(str(HERE / f"{name}.toml"), seed=seed, rate=rate, limit=num_requests) for seed in range(seeds)
    ]
    pairs = [(serve("fcfs", load, **engine), serve("skip_join", load, **engine)) for load in loads]
    times_s = [[np.array([one.e2e_s for one in run.records]) for run in pair] for pair in pairs]
    mean = run_interval(np.array([math.log(fcfs.mean() / queues.mean()) for fcfs, queues in times_s]))
    p90 = run_interval(np.array([math.log(np.quantile(a, 0.9) / np.quantile(b, 0.9)) for a, b in times_s]))
    return Row(
        workload=name,
        rate=rate,
        fcfs_s=float(np.mean([fcfs.mean() for fcfs, _ in times_s])),
        skip_join_s=float(np.mean([queues.mean() for _, queues in times_s])),
        mean_ratio=math.exp(mean.difference),
        mean_low=math.exp(mean.low),
        mean_high=math.exp(mean.high),
        p90_ratio=math.exp(p90.difference),
        p90_low=math.exp(p90.low),
        p90_high=math.exp(p90.high),
        num_preemptions=float(np.mean([queues.num_preemptions for _, queues in pairs])),
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table of the page; write it as JSON, if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--seeds", type=int, default=5, metavar="N")
    parser.add_argument("--num-requests", type=int, metavar="N", help="the first so many (default: all)")
    args = parser.parse_args(argv)
    rows = [compare_at(name, rate, args.seeds, args.num_requests) for name in WORKLOADS for rate in RATES]
    headings = ["workload", "rate", "fcfs s", "skip_join s", "mean", "low", "high", "p90", "low", "high", "preempted"]
    print_table(
        headings, [[one if isinstance(one, str) else f"{one:.3g}" for one in attrs.astuple(row)] for row in rows]
    )
    if args.json:
        args.json.write_text(json.dumps([attrs.asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
