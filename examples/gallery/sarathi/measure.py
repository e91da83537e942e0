"""Capacity against an objective for the time between tokens: prompts first, and prompts in chunks.

    python examples/gallery/sarathi/measure.py [--json FILE] [--rates 0.2,0.4,...] [--num-requests N]

Each configuration serves the same requests at each rate. Its capacity is the highest rate up to which the 99th percentile of all times
between tokens keeps the objective, and requests wait less than two seconds in the median to be scheduled.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import attrs
import numpy as np

from trencadis.api import load_with_plugins
from trencadis.console import print_table
from trencadis_tools.simulation import simulate
from trencadis_tools.simulation.run import token_gaps_s
from trencadis_tools.simulation.step_times import load_step_times
from trencadis_tools.workloads import Workload, load_workload

__all__ = ["CONFIGS", "OBJECTIVES_S", "STEP_TIMES", "Row", "capacity", "measure"]

HERE = Path(__file__).parent
CONFIGS = ("prefill_first", "chunked_512", "chunked_2048")
OBJECTIVES_S = (0.1, 0.5, 1.0)
RATES = "0.5,1,1.5,2,3,4,4.5,5"
STEP_TIMES = "a100:llama_3_1_8b"
"""Also those of Mistral 7B: the layers have the same sizes, and a sheet counts no embeddings."""
MAX_TTFT_P50_S = 2.0
"""Of the time to the first token, which is a little stricter than the paper's delay until a request is scheduled."""


@attrs.frozen(kw_only=True)
class Row:
    """One configuration at one rate.

    Attributes:
        config: Name of its file.
        rate: Requests a second.
        tbt_p99_s: Of all times between two tokens of a request.
        tbt_max_s: The longest.
        ttft_p50_s: Of requests.
        ttft_p99_s: Of requests.
    """

    config: str
    rate: float
    tbt_p99_s: float
    tbt_max_s: float
    ttft_p50_s: float
    ttft_p99_s: float


def measure(config: str, workload: Workload, rate: float) -> Row:
    """Serve a workload under a configuration.

    Args:
        config: One of ``CONFIGS``.
        workload: The requests.
        rate: Its own.
    """
    resolved, registry = load_with_plugins(file=HERE / f"{config}.toml", environ={})
    run = simulate(resolved.config, registry, workload, step_times=load_step_times(STEP_TIMES), token_times=True)
    gaps_s = token_gaps_s(run.records)
    ttft_s = [record.ttft_s for record in run.records]
    return Row(
        config=config,
        rate=rate,
        tbt_p99_s=float(np.percentile(gaps_s, 99)),
        tbt_max_s=float(gaps_s.max()),
        ttft_p50_s=float(np.median(ttft_s)),
        ttft_p99_s=float(np.percentile(ttft_s, 99)),
    )


def capacity(rows: Sequence[Row], objective_s: float) -> float:
    """Return the highest rate up to which an objective is kept at each rate measured; 0 if at none. Pure.

    Args:
        rows: Of one configuration.
        objective_s: For the 99th percentile of times between tokens.
    """
    kept = 0.0
    for row in sorted(rows, key=lambda row: row.rate):
        if row.tbt_p99_s > objective_s or row.ttft_p50_s > MAX_TTFT_P50_S:
            break
        kept = row.rate
    return kept


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables of the page; write the rows as JSON, if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--rates", default=RATES, metavar="A,B,...")
    parser.add_argument("--num-requests", type=int, metavar="N", help="the first so many (default: all)")
    args = parser.parse_args(argv)
    rows = []
    for rate in (float(text) for text in args.rates.split(",")):
        workload = load_workload(str(HERE / "chats.toml"), rate=rate, limit=args.num_requests)
        rows += [measure(config, workload, rate) for config in CONFIGS]
    headings = ["config", "rate", "TBT p99 s", "TBT max s", "TTFT p50 s", "TTFT p99 s"]
    print_table(
        headings, [[one if isinstance(one, str) else f"{one:.3g}" for one in attrs.astuple(row)] for row in rows]
    )
    table = []
    for config in CONFIGS:
        own = [row for row in rows if row.config == config]
        table.append([config, *(f"{capacity(own, objective_s):g}" for objective_s in OBJECTIVES_S)])
    print_table(["\ncapacity, requests/s", *(f"TBT p99 <= {one:g} s" for one in OBJECTIVES_S)], table)
    if args.json:
        args.json.write_text(json.dumps([attrs.asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
