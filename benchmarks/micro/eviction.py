"""Whether eviction policies beat least recently used out of sample: options chosen on the first part of a trace, measured on the rest.

    python benchmarks/micro/eviction.py --trace mooncake_fast25_conversation_first30min.jsonl [--split-s 900] [--other FILE] [--json]

Each policy's options are those of a small grid with the most blocks found at 3,000 and 10,000 blocks before ``--split-s``. Then it runs over
the whole trace and what is found after that moment counts, under the rules of published tables and with the chain order of the
engine. ``--other`` names a trace of another workload, which no option was chosen on. No time is measured: the figures are exact.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trencadis.clock import SimulatedClock
from trencadis.interfaces import ComponentContext, EvictionPolicy
from trencadis.registry import Registry
from trencadis_tools.bench import best_hit_ratio, measure_eviction
from trencadis_tools.bench.block_trace import BlockRequest, parse_block_trace

CAPACITIES = (1000, 3000, 10_000, 30_000)
CHOSEN_AT = (3000, 10_000)
GRIDS: dict[str, dict[str, Sequence[float]]] = {
    "lru": {},
    "lfu": {"half_life_s": (0.0, 150.0, 300.0, 600.0), "history": (1.0, 4.0)},
    "cost_aware": {"attention_blocks": (0, 16), "history": (1.0, 4.0)},
    "s3_fifo": {"small_ratio": (0.05, 0.1, 0.25), "history": (1.0, 4.0)},
    "slru": {"protected_ratio": (0.5, 0.8)},
    "two_queue": {"new_ratio": (0.1, 0.25, 0.5)},
    "arc": {},
}

Maker = Callable[[], EvictionPolicy]


def maker(registry: Registry, name: str, options: dict[str, float]) -> Maker:
    """Return what makes a policy with some options."""
    registered = registry.components("eviction")[name]
    config = registered.component.config
    context = ComponentContext(clock=SimulatedClock(), seed=0)
    return lambda: registry.build(registered, config(**options) if config else {}, context)  # type: ignore[no-any-return]


def settings(name: str) -> list[dict[str, float]]:
    """Return every point of a policy's grid."""
    grid = GRIDS[name]
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def choose(registry: Registry, name: str, requests: Sequence[BlockRequest]) -> dict[str, float]:
    """Return the options with which a policy finds most; the first of equals."""

    def num_found(options: dict[str, float]) -> int:
        make = maker(registry, name, options)
        return sum(measure_eviction(name, make, requests, capacity=blocks).num_hits for blocks in CHOSEN_AT)

    found = settings(name)
    return found[0] if len(found) == 1 else max(found, key=num_found)


def ratios(name: str, make: Maker, requests: Sequence[BlockRequest], **more: Any) -> dict[str, float]:
    """Return the share of blocks that a policy finds, by capacity."""
    runs = {blocks: measure_eviction(name, make, requests, capacity=blocks, **more) for blocks in CAPACITIES}
    return {str(blocks): round(run.hit_ratio, 4) for blocks, run in runs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--split-s", type=float, default=900.0)
    parser.add_argument("--other", type=Path)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    registry = Registry.discover()
    requests = parse_block_trace(args.trace.read_text(), args.trace.name)
    before = [request for request in requests if request.arrival_s < args.split_s]
    other = parse_block_trace(args.other.read_text(), args.other.name) if args.other else ()
    rows = []
    for name in GRIDS:
        options = choose(registry, name, before)
        make = maker(registry, name, options)
        row: dict[str, Any] = {"policy": name, "options": options}
        row["after_split"] = ratios(name, make, requests, from_s=args.split_s)
        row["after_split_in_chain_order"] = ratios(name, make, requests, from_s=args.split_s, chain_order=True)
        if other:
            row["other_trace"] = ratios(name, make, other)
        rows.append(row)
    best = best_hit_ratio(requests, from_s=args.split_s)
    facts = {
        "trace": args.trace.name,
        "split_s": args.split_s,
        "other": args.other and args.other.name,
        "unlimited": best,
    }
    if args.json:
        print(json.dumps(facts | {"rows": rows}, indent=2))
        return
    for part in ("after_split", "after_split_in_chain_order", "other_trace"):
        print(part)
        for row in rows:
            if part in row:
                print(f"  {row['policy']:12} {row['options']!s:46} " + " ".join(f"{x:.4f}" for x in row[part].values()))


if __name__ == "__main__":
    main()
