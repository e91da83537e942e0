"""Padding of bucket tables on a trace: learnt on its first half, measured on its second; and what look-up and fitting take.

    python benchmarks/micro/buckets.py --trace ../shared/data/traces/azure_llm_2023_conv.csv --json

First the axis of query lengths alone: equal numbers of buckets, exponential against fitted, prompts up to 8,192 tokens in
one pass. Then whole tables, by simulated steps. Padding is what is computed beyond what was asked for.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import attrs

from trencadis.interfaces import BucketingStrategy
from trencadis.records import BucketLimits, Phase, Shape
from trencadis_gallery.bucketing.fitted import Fitted
from trencadis_gallery.bucketing.workloads import DeviceCost, Workload
from trencadis_gallery.bucketing.workloads.trace import Arrival
from trencadis_gallery.bucketing.workloads.workload import Passes, Source, read_source, write_shapes
from trencadis_gallery.config import FittedConfig
from trencadis_plugins.bucketing.config import LinearConfig, PaddingAwareConfig
from trencadis_plugins.bucketing.exponential import Exponential
from trencadis_plugins.bucketing.linear import Linear
from trencadis_plugins.bucketing.padding_aware import PaddingAware
from trencadis_tools.buckets import measure

LONGEST = 8192
LIMITS = BucketLimits(
    block_size=128,
    max_model_len=LONGEST,
    max_num_seqs=256,
    max_num_batched_tokens=2048,
    max_prefill_batch_size=1,
    num_blocks=4000,
    contiguous=False,
    prefix_caching=True,
    max_draft_tokens=0,
)
COST = DeviceCost()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--graphs", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    arrivals = read_source(options.trace).arrivals
    halves = arrivals[: len(arrivals) // 2], arrivals[len(arrivals) // 2 :]
    with tempfile.TemporaryDirectory() as folder:
        results = {
            "query_axis": query_axis(halves, Path(folder)),
            "tables": tables(halves, Path(folder), options.graphs),
        }
    if options.json:
        print(json.dumps(results, indent=1))
        return
    for part, rows in results.items():
        print(part)
        for row in rows:
            print("  ", "  ".join(f"{key} {value}" for key, value in row.items()))


def query_axis(halves: tuple[tuple[Arrival, ...], ...], folder: Path) -> list[dict[str, object]]:
    limits = attrs.evolve(LIMITS, max_num_batched_tokens=LONGEST)
    first, second = (prompts(half) for half in halves)
    write_shapes(folder / "first.csv", first)
    exponential = Exponential(limits)
    num_graphs = len({bucket.query_len for bucket in exponential.buckets(limits) if bucket.phase is Phase.PREFILL})
    # One more bucket than there are query lengths: the largest decode bucket is always prepared.
    fitted = Fitted(limits, FittedConfig(trace=str(folder / "first.csv"), max_graphs=num_graphs + 1))
    strategies: dict[str, BucketingStrategy] = {"exponential": exponential, "fitted": fitted}
    return [
        {"strategy": name, "query_lens": num_graphs, "padding": measure(strategy, limits, COST, second).prompt_padding}
        for name, strategy in strategies.items()
    ]


def prompts(arrivals: tuple[Arrival, ...]) -> Workload:
    """Every prompt in one pass of its own, none longer than the longest."""
    counts: dict[int, int] = {}
    for arrival in arrivals:
        size = min(arrival.num_prompt_tokens, LONGEST)
        counts[size] = counts.get(size, 0) + 1
    return Workload(tuple(Passes(Shape(1, size, 0), count, size * count) for size, count in sorted(counts.items())))


def tables(halves: tuple[tuple[Arrival, ...], ...], folder: Path, graphs: list[int]) -> list[dict[str, object]]:
    first, second = (Source("half", arrivals=half).workload(LIMITS, COST) for half in halves)
    write_shapes(folder / "steps.csv", first)
    makers = {
        "exponential": lambda: Exponential(LIMITS),
        "linear": lambda: Linear(LIMITS, LinearConfig()),
        "padding_aware": lambda: PaddingAware(LIMITS, PaddingAwareConfig()),
        **{
            f"fitted, {number}": lambda number=number: Fitted(
                LIMITS, FittedConfig(trace=str(folder / "steps.csv"), max_graphs=number)
            )
            for number in graphs
        },
    }
    rows = []
    for name, make in makers.items():
        start_s = time.process_time()
        strategy = make()
        made_s = time.process_time() - start_s
        report = measure(strategy, LIMITS, COST, second)
        facts = attrs.asdict(report, filter=lambda field, _: field.name != "buckets")
        rows.append(
            {
                "strategy": name,
                "buckets": len(report.buckets),
                **{key: round(value, 4) for key, value in facts.items()},
                "made_cpu_s": round(made_s, 3),
                "look_up_us": round(look_up_us(strategy, second), 2),
            }
        )
    return rows


def look_up_us(strategy: BucketingStrategy, workload: Workload) -> float:
    shapes = [item.shape for item in workload.passes][:2000]
    times = []
    for _ in range(5):
        start_s = time.process_time()
        for shape in shapes:
            strategy.bucket_for(shape)
        times.append((time.process_time() - start_s) / len(shapes) * 1e6)
    return statistics.median(times)


if __name__ == "__main__":
    main()
