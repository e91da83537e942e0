"""``trencadis bench``: measure the configured engine, drafters or KV connectors beside it, a policy alone, or fit step times."""

from __future__ import annotations

import argparse
import json

import attrs

from trencadis.api import Config, Registry
from trencadis.console import print_table
from trencadis_tools.commands import bench_eviction, bench_fit, bench_kv, bench_schedule, bench_speculation

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags."""
    from trencadis_tools.bench import ThroughputWorkload

    helps = {
        "num_requests": "requests, all queued at the start",
        "input_len": "random prompt tokens of each",
        "output_len": "output tokens of each",
        "seed": "of the prompts",
    }
    parser.add_argument(
        "measurement",
        choices=["throughput", "speculation", "schedule", "eviction", "kv", "fit"],
        help=f"throughput: output tokens a second, offline; speculation: {bench_speculation.HELP}; schedule: "
        f"{bench_schedule.HELP}; eviction: {bench_eviction.HELP}; kv: {bench_kv.HELP}; fit: {bench_fit.HELP}",
    )
    for field in attrs.fields(ThroughputWorkload):
        flag = f"--{field.name.replace('_', '-')}"
        text = f"{helps[field.name]} (default: {field.default})"
        parser.add_argument(flag, dest=field.name, type=int, default=field.default, metavar="N", help=text)
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help="for eviction: a trace file with block hashes, or the name of a built-in one",
    )
    parser.add_argument("--policies", metavar="A,B,...", help="which policies (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    bench_speculation.add_arguments(parser)
    bench_schedule.add_arguments(parser)
    bench_eviction.add_arguments(parser)
    bench_kv.add_arguments(parser)
    bench_fit.add_arguments(parser)


def run(args: argparse.Namespace, config: Config, registry: Registry) -> int:
    """Measure and print; returns 0.

    Raises:
        ConfigError: A flag or file that cannot be used.
        TrencadisError: The engine or a policy cannot be built, or a request failed.
    """
    if args.measurement == "schedule":
        return bench_schedule.run(args, config, registry)
    if args.measurement == "speculation":
        return bench_speculation.run(args, config, registry)
    if args.measurement == "eviction":
        return bench_eviction.run(args, config, registry)
    if args.measurement == "kv":
        return bench_kv.run(args, config, registry)
    if args.measurement == "fit":
        return bench_fit.run(args, config, registry)
    return _throughput(args, config, registry)


def _throughput(args: argparse.Namespace, config: Config, registry: Registry) -> int:
    from trencadis.errors import ConfigValueError
    from trencadis_tools.bench import ThroughputWorkload, measure_throughput

    try:
        workload = ThroughputWorkload(
            **{field.name: getattr(args, field.name) for field in attrs.fields(ThroughputWorkload)}
        )
    except ValueError as error:
        raise ConfigValueError(f"trencadis bench throughput: {error}.") from error
    result = attrs.asdict(measure_throughput(config, registry, workload))
    if args.json:
        print(json.dumps(result))
        return 0
    print_table(("measure", "value"), [(name, _show(value)) for name, value in result.items()])
    return 0


def _show(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
