"""Shortest answer first by a ranking that is more or less right, against first come, first served.

    python examples/gallery/learning_to_rank/measure.py [--json FILE] [--seeds N] [--num-requests N]

No policy sees how long an answer will be. Here, as in the paper, something in front of the engine ranks the requests, and the rank is the
priority that a request is sent with. It comes from the true lengths and noise, so that the ranking has a given Kendall's tau.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist

import attrs
import numpy as np

from trencadis.api import load_with_plugins
from trencadis.console import print_table
from trencadis_tools.compare.statistics import run_interval
from trencadis_tools.simulation import Run, simulate
from trencadis_tools.simulation.step_times import LinearStepTimes
from trencadis_tools.workloads import Workload, load_workload

__all__ = ["LOADS", "TAUS", "Row", "compare_at", "latency_per_token_s", "ranked", "serve", "time_to_fifth_s"]

HERE = Path(__file__).parent
TAUS = (0.3, 0.5, 0.7, 0.9, 1.0)
LOADS = {"4 requests/s": 4.0, "all at once": math.inf}


@attrs.frozen(kw_only=True)
class Row:
    """A ranking under a load, against first come, first served, over several seeds.

    Attributes:
        load: Its name.
        tau: Kendall's, between ranking and true lengths.
        fcfs_s: The mean over seeds of first come, first served: of the time of a request for each token of its answer, or, if all come at
            once, of the time until a fifth is answered.
        value_s: That of the ranking.
        gain: First come, first served by this: the geometric mean over seeds.
        gain_low: Lower end of its 95 % interval, of pairs with equal seeds.
        gain_high: Upper end.
        worst_ratio: The longest time from sent to answered, by that of first come, first served; the geometric mean over seeds.
    """

    load: str
    tau: float
    fcfs_s: float
    value_s: float
    gain: float
    gain_low: float
    gain_high: float
    worst_ratio: float


def ranked(workload: Workload, tau: float, seed: int) -> Workload:
    """Return the workload with ranks as priorities: 0 for the answer that is taken for the shortest. Pure.

    Normal scores of the true ranks, and normal noise, are added so that their correlation is r = sin(pi tau / 2).

    Args:
        workload: Requests.
        tau: Kendall's, of ranks and true lengths, expected; 0 to 1.
        seed: Of the noise.

    Source: tau = 2 / pi * asin(r) for normal variables, Kendall, Rank Correlation Methods, 1948.
    """
    lengths = np.array([one.num_output_tokens for one in workload.requests])
    num = len(lengths)
    scores = np.empty(num)
    scores[np.argsort(lengths, kind="stable")] = [NormalDist().inv_cdf((place + 0.5) / num) for place in range(num)]
    correlation = math.sin(math.pi * tau / 2)
    noise = np.random.default_rng(seed).standard_normal(num)
    places = np.argsort(np.argsort(correlation * scores + math.sqrt(1 - correlation**2) * noise)).tolist()
    requests = tuple(attrs.evolve(one, priority=place) for one, place in zip(workload.requests, places, strict=True))
    return attrs.evolve(workload, requests=requests)


def serve(workload: Workload, policy: str) -> Run:
    """Serve a workload under a built-in policy."""
    resolved, registry = load_with_plugins(
        file=HERE / "config.toml", environ={}, overrides={"scheduling": {"name": policy}}
    )
    return simulate(resolved.config, registry, workload, step_times=LinearStepTimes())


def latency_per_token_s(run: Run) -> float:
    """Return the mean over requests of the time from sent to answered, for each token of the answer. Pure."""
    return float(np.mean([one.e2e_s / one.num_output_tokens for one in run.records]))


def time_to_fifth_s(run: Run) -> float:
    """Return when a fifth of the requests is answered. Pure."""
    return float(np.quantile([one.finished_s for one in run.records], 0.2))


def compare_at(load: str, seeds: int, taus: Sequence[float] = TAUS, num_requests: int | None = None) -> list[Row]:
    """Compare rankings with first come, first served, on the same requests.

    Args:
        load: One of ``LOADS``.
        seeds: Workloads, drawn independently.
        taus: Of the rankings.
        num_requests: Of each workload; None: all.
    """
    rate = LOADS[load]
    value = time_to_fifth_s if rate == math.inf else latency_per_token_s
    workloads = [
        load_workload(str(HERE / "chats.toml"), seed=seed, rate=rate, limit=num_requests) for seed in range(seeds)
    ]
    fcfs = [serve(workload, "fcfs") for workload in workloads]
    rows = []
    for tau in taus:
        runs = [serve(ranked(workload, tau, seed), "priority") for seed, workload in enumerate(workloads)]
        gains = np.log([value(base) / value(run) for base, run in zip(fcfs, runs, strict=True)])
        worst = np.log([_longest_s(run) / _longest_s(base) for base, run in zip(fcfs, runs, strict=True)])
        interval = run_interval(gains)
        rows.append(
            Row(
                load=load,
                tau=tau,
                fcfs_s=float(np.mean([value(run) for run in fcfs])),
                value_s=float(np.mean([value(run) for run in runs])),
                gain=math.exp(interval.difference),
                gain_low=math.exp(interval.low),
                gain_high=math.exp(interval.high),
                worst_ratio=float(np.exp(worst.mean())),
            )
        )
    return rows


def _longest_s(run: Run) -> float:
    return max(one.e2e_s for one in run.records)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table of the page; write it as JSON, if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--seeds", type=int, default=5, metavar="N")
    parser.add_argument("--num-requests", type=int, metavar="N", help="the first so many (default: all)")
    args = parser.parse_args(argv)
    rows = [row for load in LOADS for row in compare_at(load, args.seeds, num_requests=args.num_requests)]
    headings = ["load", "tau", "fcfs s", "ranking s", "gain", "low", "high", "longest"]
    print_table(
        headings, [[one if isinstance(one, str) else f"{one:.3g}" for one in attrs.astuple(row)] for row in rows]
    )
    if args.json:
        args.json.write_text(json.dumps([attrs.asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
