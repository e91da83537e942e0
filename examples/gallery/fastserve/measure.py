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
from trencadis.records import FloatArray
from trencadis_tools.compare.statistics import run_interval
from trencadis_tools.simulation import Run, simulate
from trencadis_tools.simulation.step_times import LinearStepTimes
from trencadis_tools.workloads import Workload, load_workload

__all__ = ["QUEUES", "RATES", "WORKLOADS", "Row", "compare_at", "serve"]

HERE = Path(__file__).parent
WORKLOADS = ("chats", "skewed")
RATES = (3.0, 6.0)
QUEUES = ("skip_join", "skip_join_time")
"""Quanta in tokens, and in time."""


@attrs.frozen(kw_only=True)
class Row:
    """Two policies on the same requests; ratios are first come, first served by feedback queues, geometric means over seeds.

    Attributes:
        queues: Name of the configuration of the feedback queues.
        workload: Name of its file.
        rate: Requests a second.
        fcfs_s: Mean time from sent to answered, the mean over seeds.
        queues_s: The same.
        mean_ratio: Of the mean time.
        mean_low: Lower end of its 95 % interval.
        mean_high: Upper end.
        p90_ratio: Of the 90th percentile of the time.
        p90_low: Lower end of its 95 % interval.
        p90_high: Upper end.
        num_preemptions: Under feedback queues, the mean over seeds.
    """

    queues: str
    workload: str
    rate: float
    fcfs_s: float
    queues_s: float
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


def compare_at(name: str, rate: float, seeds: int, num_requests: int | None = None, **engine: int) -> list[Row]:
    """Serve workloads of several seeds first come, first served, and under feedback queues; a row for each of ``QUEUES``.

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
    fcfs = [_times_s(serve("fcfs", load, **engine)) for load in loads]
    rows = []
    for queues in QUEUES:
        runs = [serve(queues, load, **engine) for load in loads]
        pairs = [(before, _times_s(run)) for before, run in zip(fcfs, runs, strict=True)]
        mean = run_interval(np.array([math.log(a.mean() / b.mean()) for a, b in pairs]))
        p90 = run_interval(np.array([math.log(np.quantile(a, 0.9) / np.quantile(b, 0.9)) for a, b in pairs]))
        rows.append(
            Row(
                queues=queues,
                workload=name,
                rate=rate,
                fcfs_s=float(np.mean([a.mean() for a, _ in pairs])),
                queues_s=float(np.mean([b.mean() for _, b in pairs])),
                mean_ratio=math.exp(mean.difference),
                mean_low=math.exp(mean.low),
                mean_high=math.exp(mean.high),
                p90_ratio=math.exp(p90.difference),
                p90_low=math.exp(p90.low),
                p90_high=math.exp(p90.high),
                num_preemptions=float(np.mean([run.num_preemptions for run in runs])),
            )
        )
    return rows


def _times_s(run: Run) -> FloatArray:
    return np.array([one.e2e_s for one in run.records])


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table of the page; write it as JSON, if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--seeds", type=int, default=5, metavar="N")
    parser.add_argument("--num-requests", type=int, metavar="N", help="the first so many (default: all)")
    args = parser.parse_args(argv)
    rows = [
        row for name in WORKLOADS for rate in RATES for row in compare_at(name, rate, args.seeds, args.num_requests)
    ]
    headings = ["queues", "workload", "rate", "fcfs s", "queues s", "mean", "low", "high", "p90", "low", "high"]
    headings.append("preempted")
    print_table(
        headings, [[one if isinstance(one, str) else f"{one:.3g}" for one in attrs.astuple(row)] for row in rows]
    )
    if args.json:
        args.json.write_text(json.dumps([attrs.asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
