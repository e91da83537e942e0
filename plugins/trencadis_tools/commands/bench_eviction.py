"""``trencadis bench eviction``: prefix hits of eviction policies on a trace of block hashes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import attrs

from trencadis.api import Config, Registry
from trencadis.clock import SimulatedClock
from trencadis.console import print_table
from trencadis.errors import ConfigError, ConfigValueError
from trencadis.interfaces import ComponentContext, EvictionPolicy

if TYPE_CHECKING:
    from trencadis_tools.bench import EvictionResult
    from trencadis_tools.bench.block_trace import BlockRequest

__all__ = ["HELP", "add_arguments", "run"]

HELP = "prefix hits of eviction policies on --trace, without a model"

_CAPACITIES = "1000,3000,10000,30000"
_ORDERS = ("tail_first", "head_first")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement; ``--trace``, ``--policies`` and ``--json`` are shared."""
    group = parser.add_argument_group("eviction")
    group.add_argument(
        "--capacity", default=_CAPACITIES, metavar="N,N,...", help=f"cache sizes in blocks (default: {_CAPACITIES})"
    )
    group.add_argument(
        "--from-s", type=float, default=0.0, metavar="S", help="earlier requests fill the cache and are not counted"
    )
    group.add_argument("--until-s", type=float, metavar="S", help="leave out requests from then on (default: none)")
    group.add_argument(
        "--free-order", choices=_ORDERS, default=_ORDERS[0], help="which block of a request is freed first"
    )
    group.add_argument(
        "--chain-order",
        action="store_true",
        help="evict with a block what can only be found through it, as the engine does",
    )


def run(args: argparse.Namespace, config: Config, registry: Registry) -> int:
    """Measure and print; returns 0.

    Raises:
        ConfigError: The trace cannot be read, or a flag makes no sense.
        PluginError: A policy does not exist or cannot be built.
        StepFailedError: A policy failed.
    """
    from trencadis_tools.bench import best_hit_ratio, measure_eviction

    capacities = _capacities(args.capacity)
    requests = _requests(args)
    makers = _makers(args.policies, config, registry)
    results = [
        measure_eviction(
            name,
            make,
            requests,
            capacity=capacity,
            from_s=args.from_s,
            tail_first=args.free_order == _ORDERS[0],
            chain_order=args.chain_order,
        )
        for name, make in makers.items()
        for capacity in capacities
    ]
    best = best_hit_ratio(requests, from_s=args.from_s)
    if args.json:
        facts = {key: getattr(args, key) for key in ("trace", "from_s", "until_s", "free_order", "chain_order")}
        print(json.dumps(facts | {"unlimited": best, "results": [attrs.asdict(result) for result in results]}))
    else:
        _print(results, capacities, best)
    return 0


def _capacities(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigError(f"flag --capacity {text!r}: no list of numbers of blocks.", hint="Write 1000,3000.")
    return [int(part) for part in dict.fromkeys(parts)]


def _requests(args: argparse.Namespace) -> Sequence[BlockRequest]:
    """Return the requests of the trace.

    Raises:
        ConfigError: There is no trace, or none of its requests would be counted.
    """
    from trencadis_gallery.bucketing.workloads.trace import read_text
    from trencadis_tools.bench.block_trace import parse_block_trace
    from trencadis_tools.workloads import trace_file

    if not args.trace:
        raise ConfigError(
            "trencadis bench eviction: --trace is missing.",
            hint="Name a file of JSON lines with hash_ids, or mooncake_conversation.",
        )
    file = trace_file(args.trace)
    until_s = float("inf") if args.until_s is None else args.until_s
    requests = [row for row in parse_block_trace(read_text(file), str(file)) if row.arrival_s < until_s]
    if not any(row.arrival_s >= args.from_s and row.contents for row in requests):
        raise ConfigError(
            f"{file}: no request with blocks from {args.from_s:g} s to {until_s:g} s.",
            hint="Change --from-s or --until-s.",
        )
    return requests


def _makers(policies: str | None, config: Config, registry: Registry) -> dict[str, Callable[[], EvictionPolicy]]:
    """Return a factory of each policy by name, with the options of the configuration.

    Raises:
        ConfigValueError: An option is missing.
        PluginError: A policy does not exist.
    """
    names = [name.strip() for name in policies.split(",")] if policies else list(registry.components("eviction"))
    context = ComponentContext(clock=SimulatedClock(), seed=config.engine.seed)

    def maker(name: str) -> Callable[[], EvictionPolicy]:
        item = registry.select("eviction", name, source="flag --policies", may_import=True)
        options = config.eviction.components.get(item.name)
        if options is None:
            try:
                options = item.component.config()
            except TypeError as error:
                raise ConfigValueError(
                    f"[eviction.{item.name}]: a value that {item} needs is missing: {error}.",
                    hint=f"Set it in the table [eviction.{item.name}].",
                ) from error
        return lambda: registry.build(item, options, context)

    return {name: maker(name) for name in names}


def _print(results: Sequence[EvictionResult], capacities: Sequence[int], best: float) -> None:
    ratios: dict[str, list[str]] = {}
    for result in results:
        ratios.setdefault(result.policy, []).append(f"{result.hit_ratio:.4f}")
    rows = [(name, *cells) for name, cells in ratios.items()]
    rows.append(("unlimited cache", *[f"{best:.4f}"] * len(capacities)))
    print_table(("hit ratio", *(f"{capacity:,} blocks" for capacity in capacities)), rows)
