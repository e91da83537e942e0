"""``trencadis bench kv``: comparison of KV connectors, loading a prompt against computing it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import attrs

from trencadis.api import Config, Registry
from trencadis.console import print_table
from trencadis.errors import ConfigError, ConfigValueError

if TYPE_CHECKING:
    from trencadis_tools.bench import KVResult

__all__ = ["HELP", "add_arguments", "run"]

HELP = "KV connectors: time to the first token of a prompt that is loaded, against computing it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement; ``--seed`` and ``--json`` are shared."""
    group = parser.add_argument_group(
        "kv", "Options of a connector, such as --kv-connector.redis.url, are those of the configuration."
    )
    group.add_argument(
        "--connectors",
        metavar="A,B,...",
        help="which KV connectors (default: all that can be used); none measures the noise",
    )
    group.add_argument(
        "--num-tokens",
        dest="kv_num_tokens",
        type=int,
        default=0,
        metavar="N",
        help="prompt tokens (default: 4096, or as many as the model takes)",
    )
    group.add_argument(
        "--pairs", dest="kv_pairs", type=int, default=4, metavar="N", help="prompts, computed and loaded (default: 4)"
    )


def run(args: argparse.Namespace, config: Config, registry: Registry) -> int:
    """Measure and print; returns 0.

    Raises:
        ConfigError: A flag makes no sense, there is no such connector, or its store cannot be used.
        TrencadisError: An engine cannot be built, or a request failed.
    """
    from trencadis_tools.bench import KVWorkload, measure_kv

    connectors = _connectors(args.connectors, registry)
    try:
        workload = KVWorkload(num_tokens=args.kv_num_tokens, num_pairs=args.kv_pairs, seed=args.seed)
    except ValueError as error:
        raise ConfigValueError(f"trencadis bench kv: {error}.") from error
    with _own_directories(config, registry) as config:
        results = measure_kv(
            config, registry, workload, connectors=connectors, on_unusable=None if args.connectors else _left_out
        )
    if args.json:
        print(json.dumps([attrs.asdict(result) for result in results]))
        return 0
    headings = (
        "connector",
        "computed",
        "loaded",
        "ratio (quartiles)",
        "CPU",
        "loaded tokens",
        "MiB/s",
        "read by",
        "same text",
    )
    print_table(headings, [_row(result) for result in results])
    return 0


def _connectors(given: str | None, registry: Registry) -> tuple[str, ...]:
    """Return the names of the connectors to measure; raises for an unknown name before the first measurement."""
    names = tuple(name.strip() for name in (given or "").split(",") if name.strip())
    for name in names:
        if name != "none":
            registry.select("kv_connector", name, source="--connectors", may_import=True)
    return names or tuple(registry.components("kv_connector"))


def _left_out(name: str, error: ConfigError) -> None:
    print(f"{name} is left out: {error}", file=sys.stderr)


@contextmanager
def _own_directories(config: Config, registry: Registry) -> Iterator[Config]:
    """Give connectors that store in a directory a temporary one if none is configured."""
    with TemporaryDirectory(prefix="trencadis-bench-") as directory:
        options = dict(config.kv_connector.components)
        for name, component in registry.components("kv_connector").items():
            own = options.get(name)
            if own is None:
                continue
            if getattr(own, "path", None) == "":
                options[name] = attrs.evolve(own, path=f"{directory}/{component.name}")
        yield attrs.evolve(config, kv_connector=attrs.evolve(config.kv_connector, components=options))


def _row(result: KVResult) -> tuple[str, ...]:
    low, _, high = result.ratio_quartiles
    return (
        result.connector,
        f"{1000 * result.computed_s:.1f} ms",
        f"{1000 * result.loaded_s:.1f} ms",
        f"{result.ratio:.3f} ({low:.3f} to {high:.3f})",
        f"{1000 * result.computed_cpu_s:.0f} to {1000 * result.loaded_cpu_s:.0f} ms",
        f"{result.num_loaded_tokens:.0f} of {result.num_tokens}",
        f"{result.load_bytes_per_s / 2**20:.0f}",
        result.reader,
        f"{result.num_same_texts} of {result.num_pairs}",
    )
