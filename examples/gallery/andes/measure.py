"""Quality of experience against rate under six policies, on OPT 66B on four A100 by data sheet.

    python examples/gallery/andes/measure.py [--json FILE] [--loads chats,gamma,bursts] [--rates 8,10,...] [--seeds N] [--num-requests N]

`trencadis compare` has no value for a run whose backlog grows. Here the run is what is measured: what readers of it got.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from trencadis.api import load_with_plugins
from trencadis.console import print_table
from trencadis_tools.compare.statistics import run_interval
from trencadis_tools.simulation import Run, simulate
from trencadis_tools.simulation.qoe import qoe_of, qoe_v1_of
from trencadis_tools.simulation.step_times import load_step_times
from trencadis_tools.workloads import Workload, load_workload

__all__ = ["CAPACITY_QOE", "HERE", "POLICIES", "RATES", "Row", "capacity", "compare_at", "serve"]

HERE = Path(__file__).parent
RATES = {"chats": (7.0, 9.0, 10.0, 12.0, 16.0), "gamma": (6.0, 7.0, 9.0, 12.0), "bursts": (4.0, 6.0, 8.0, 10.0)}
STEP_TIMES = f"a100:{HERE / 'opt_66b.json'}:tp4"
CAPACITY_QOE = 0.9
_HERE = "examples.gallery.andes.policies"
_STEPS = {"step_ms": 24.1, "context_token_us": 0.58, "prompt_token_us": 116.0}
"""What the step times are for 1 and 128 sequences, and for a step of 2,048 prompt tokens."""
_FIRST = {"refine": False, "max_preemptions": 1.0}
POLICIES: Mapping[str, Mapping[str, Any]] = {
    "fcfs": {"name": "fcfs"},
    "round_robin": {"name": f"{_HERE}:RoundRobin"},
    "multi_level": {"name": "multi_level", "multi_level": {"preempt": True}},
    "deadline": {"name": "deadline"},
    "andes_v1": {"name": f"{_HERE}:Andes", "options": {**_STEPS, **_FIRST}},
    "andes": {"name": f"{_HERE}:Andes", "options": {**_STEPS, "max_preemptions": 0.0}},
}


@attrs.frozen(kw_only=True)
class Row:
    """One policy at one rate; means over seeds.

    Attributes:
        load: Name of the workload's file.
        rate: Requests a second.
        policy: One of ``POLICIES``.
        qoe: Mean quality of experience, as in the paper's second version.
        qoe_v1: As in its first version.
        above: Share of requests with 0.9 or more.
        ttft_p90_s: 90th percentile of the time to the first token.
        preemptions: For each request.
        tokens_per_s: Output, of the whole run.
        ratio: Mean quality by that of ``fcfs``, geometric mean over seeds.
        low: Lower end of its 95 % interval.
        high: Upper end.
    """

    load: str
    rate: float
    policy: str
    qoe: float
    qoe_v1: float
    above: float
    ttft_p90_s: float
    preemptions: float
    tokens_per_s: float
    ratio: float
    low: float
    high: float


def serve(policy: str, workload: Workload, **tables: Mapping[str, Any]) -> Run:
    """Serve a workload.

    Args:
        policy: One of ``POLICIES``.
        workload: With targets.
        tables: Settings over those of ``config.toml``.
    """
    overrides = {**tables, "scheduling": POLICIES[policy]}
    resolved, registry = load_with_plugins(file=HERE / "config.toml", environ={}, overrides=overrides)
    return simulate(resolved.config, registry, workload, step_times=load_step_times(STEP_TIMES), token_times=True)


def compare_at(load: str, rate: float, seeds: int, num_requests: int | None = None) -> list[Row]:
    """Serve workloads of several seeds under every policy.

    Args:
        load: One of ``RATES``.
        rate: Requests a second.
        seeds: Workloads, drawn independently.
        num_requests: Of each; None: all.
    """
    workloads = [
        load_workload(str(HERE / f"{load}.toml"), seed=seed, rate=rate, limit=num_requests) for seed in range(seeds)
    ]
    rows: list[Row] = []
    baseline = np.ones(seeds)
    for policy in POLICIES:
        runs = [serve(policy, workload) for workload in workloads]
        qoe = np.array([[qoe_of(one) for one in run.records] for run in runs])
        baseline = baseline if rows else qoe.mean(axis=1)
        ratio = run_interval(np.log(qoe.mean(axis=1) / baseline))
        rows.append(
            Row(
                load=load,
                rate=rate,
                policy=policy,
                qoe=float(qoe.mean()),
                qoe_v1=float(np.mean([qoe_v1_of(one) for run in runs for one in run.records])),
                above=float((qoe >= CAPACITY_QOE).mean()),
                ttft_p90_s=float(np.mean([np.quantile([one.ttft_s for one in run.records], 0.9) for run in runs])),
                preemptions=float(np.mean([run.num_preemptions / len(run.records) for run in runs])),
                tokens_per_s=float(
                    np.mean([sum(one.num_output_tokens for one in run.records) / run.duration_s for run in runs])
                ),
                ratio=math.exp(ratio.difference),
                low=math.exp(ratio.low),
                high=math.exp(ratio.high),
            )
        )
    return rows


def capacity(rows: Sequence[Row]) -> float:
    """Return the rate at which the mean quality falls below ``CAPACITY_QOE``, on lines between the rates measured. Pure.

    The largest rate if it does not, 0 if it is lower at the smallest.

    Args:
        rows: Of one load and policy.
    """
    ordered = sorted(rows, key=lambda row: row.rate)
    if ordered[0].qoe < CAPACITY_QOE:
        return 0.0
    for before, after in itertools.pairwise(ordered):
        if after.qoe < CAPACITY_QOE:
            share = (before.qoe - CAPACITY_QOE) / (before.qoe - after.qoe)
            return before.rate + share * (after.rate - before.rate)
    return ordered[-1].rate


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables of the page; write the rows as JSON, if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--loads", default=",".join(RATES), metavar="A,B,...")
    parser.add_argument("--rates", metavar="A,B,...", help="requests a second (default: those of the page)")
    parser.add_argument("--seeds", type=int, default=3, metavar="N")
    parser.add_argument("--num-requests", type=int, metavar="N", help="the first so many (default: all)")
    args = parser.parse_args(argv)
    rows: list[Row] = []
    for load in args.loads.split(","):
        rates = [float(text) for text in args.rates.split(",")] if args.rates else RATES[load]
        for rate in rates:
            rows += compare_at(load, rate, args.seeds, args.num_requests)
    headings = [
        "load",
        "rate",
        "policy",
        "QoE",
        "v1",
        ">= 0.9",
        "TTFT p90 s",
        "preempted",
        "tokens/s",
        "ratio",
        "low",
        "high",
    ]
    print_table(
        headings, [[one if isinstance(one, str) else f"{one:.3g}" for one in attrs.astuple(row)] for row in rows]
    )
    table = [
        [
            load,
            *(
                f"{capacity([row for row in rows if (row.load, row.policy) == (load, policy)]):.1f}"
                for policy in POLICIES
            ),
        ]
        for load in args.loads.split(",")
    ]
    print_table(["\nrequests/s at a QoE of 0.9", *POLICIES], table)
    if args.json:
        args.json.write_text(json.dumps([attrs.asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
