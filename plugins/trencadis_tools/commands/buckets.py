"""``trencadis buckets``: the tables of bucketing strategies for given limits, and what they cost on a trace."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from trencadis.api import BUCKETING_BY_LAYOUT, Config, Registry, wanted_covering_buckets
from trencadis.console import print_table
from trencadis.errors import ConfigError
from trencadis.records import Bucket, BucketLimits, Phase, UnifiedBucket
from trencadis_gallery.bucketing.workloads.workload import read_source, write_shapes
from trencadis_plugins.bucketing.from_file import bucket_file_text, write_bucket_file
from trencadis_tools.buckets import TableReport, measure
from trencadis_tools.buckets.plot import plot_tables
from trencadis_tools.commands.bucket_strategies import build_strategies, device_cost, max_draft_tokens
from trencadis_tools.workloads import trace_file

__all__ = ["add_arguments", "run"]

FITTING = "fitted"
"""Default strategy of ``trencadis buckets fit``; ``--strategy`` may name another one with an option ``trace``."""

DEFAULT_BLOCK_SIZE = 128
DEFAULT_MAX_MODEL_LEN = 8192
"""Default for values of a backend and a model, since the command loads neither."""

_PADDED_SIZES = ("batch size", "query", "blocks")
_UNIFIED_SIZES = ("query", "shared blocks", "unique blocks", "causal")
_MEASURES = ("prompt_padding", "decode_padding", "time_padding", "num_unprepared", "num_fallbacks")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags."""
    parser.epilog = (
        "Padding is what is computed beyond what was asked for: 0.2 is a fifth more. Warm-up time, graph memory and time are "
        "estimates; their constants are in the first table [bucketing.NAME.cost], see trencadis config --explain."
    )
    parser.add_argument("action", nargs="?", choices=["fit"], help="fit: learn a table from --trace and write it to -o")
    parser.add_argument("--strategy", metavar="NAME", help="whose table (default: [bucketing] name)")
    parser.add_argument("--compare", metavar="A,B,...", help="several strategies, side by side")
    _add_limits(parser)
    parser.add_argument("--generation", help="of a strategy whose rules changed over time, such as 2025-07")
    parser.add_argument("--max-graphs", type=_whole, metavar="N", help="budget of a strategy that learns: buckets")
    parser.add_argument("--max-compile-s", type=float, metavar="S", help="the same: estimated time to prepare them")
    parser.add_argument("--max-graph-bytes", type=float, metavar="N", help="the same: estimated memory of their graphs")
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help="Azure CSV, Mooncake JSON lines, recorded shapes, or a built-in name such as azure_conv: measure padding on it",
    )
    parser.add_argument("--shapes", type=Path, metavar="FILE", help="write the shapes that the trace causes")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw buckets over the trace's shapes (matplotlib)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the table as a bucket file")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    positive: Mapping[str, Any] = {"type": _positive, "metavar": "N"}
    parser.add_argument("--max-num-seqs", **positive, help="sequences at once (default: [engine] max_num_seqs)")
    parser.add_argument(
        "--max-model-len",
        **positive,
        help=f"longest sequence (default: [model] max_model_len, else {DEFAULT_MAX_MODEL_LEN})",
    )
    parser.add_argument(
        "--max-num-batched-tokens", **positive, help="budget of a step (default: [engine] max_num_batched_tokens)"
    )
    parser.add_argument(
        "--num-device-blocks", **positive, help="KV blocks (default: [cache] num_blocks, else what all sequences fill)"
    )
    parser.add_argument(
        "--max-num-prefill-seqs", **positive, default=1, help="sequences in a prefill pass (default: 1)"
    )
    parser.add_argument(
        "--block-size", **positive, help=f"tokens per KV block (default: [cache] block_size, else {DEFAULT_BLOCK_SIZE})"
    )
    parser.add_argument(
        "--contiguous", action=argparse.BooleanOptionalAction, default=False, help="decode passes read blocks by range"
    )
    parser.add_argument(
        "--merged-prefill",
        action="store_true",
        help="prompts of a prefill pass follow each other in one row, as many as --max-num-prefill-seqs",
    )
    parser.add_argument(
        "--unified",
        action="store_true",
        help="prefills and decodes share a pass: query, shared blocks, unique blocks, causal or not",
    )
    parser.add_argument(
        "--prefix-caching",
        action=argparse.BooleanOptionalAction,
        help="prompts may start with cached blocks (default: unless --contiguous)",
    )
    parser.add_argument(
        "--num-speculative-tokens",
        type=_whole,
        metavar="N",
        help="longest draft (default: that of the configured speculator, else 0)",
    )


def _whole(text: str) -> int:
    return _at_least(0, text)


def _positive(text: str) -> int:
    return _at_least(1, text)


def _at_least(least: int, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {least}")
    return int(text)


def run(args: argparse.Namespace, config: Config, registry: Registry) -> int:
    """Print or write the requested tables; returns 0.

    Raises:
        ConfigError: A file cannot be read or written, or flags contradict each other.
        PluginError: A strategy does not exist or cannot be built.
    """
    _check(args)
    if args.trace:
        args.trace = str(trace_file(args.trace))
    limits = _limits(args, config)
    names = _names(args, config)
    options = ("trace", "generation", "max_graphs", "max_compile_s", "max_graph_bytes")
    strategies = build_strategies(names, {key: getattr(args, key) for key in options}, limits, config, registry)
    cost = device_cost(config)
    workload = read_source(Path(args.trace)).workload(limits, cost) if args.trace else None
    if args.shapes and workload:
        write_shapes(args.shapes, workload)
    reports = {}
    for name, strategy in strategies.items():
        covering = wanted_covering_buckets(config.bucketing, strategy.bucket_for, strategy.buckets(limits), limits)
        reports[name] = measure(strategy, limits, cost, workload, covering=covering)
    if args.unified:
        _check_unified(reports)
    if args.plot:
        plot_tables(args.plot, reports, workload)
    if args.output:
        _write(args.output, next(iter(reports.values())), _comment(args, names, limits))
    _print(args, reports, limits)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse contradicting flags.

    Raises:
        ConfigError: Flags contradict each other; the message says what to write instead.
    """
    if args.strategy and args.compare:
        raise ConfigError("trencadis buckets: --strategy and --compare exclude each other.", hint="Give one of them.")
    if args.compare and (args.output or args.action):
        raise ConfigError(
            "trencadis buckets: --compare writes no table.", hint="Use --strategy, or leave out fit and -o."
        )
    if args.unified and (args.trace or args.output or args.plot):
        raise ConfigError(
            "trencadis buckets: --unified goes with no trace, picture or bucket file: they know three sizes, not four.",
            hint="Leave out --unified, or --trace, --plot and -o.",
        )
    if args.merged_prefill and args.max_num_prefill_seqs == 1:
        raise ConfigError(
            "trencadis buckets: --merged-prefill with --max-num-prefill-seqs 1: there is nothing to merge.",
            hint="Raise --max-num-prefill-seqs.",
        )
    if args.merged_prefill and (args.unified or args.trace):
        raise ConfigError(
            "trencadis buckets: --merged-prefill goes with neither --unified, whose passes are one row as it is, nor --trace, "
            "whose prompts run one by one.",
            hint="Leave one of them out.",
        )
    for needs_trace in ("action", "shapes"):
        if getattr(args, needs_trace) and not args.trace:
            name = "fit" if needs_trace == "action" else "--shapes"
            raise ConfigError(f"trencadis buckets: {name} needs --trace.", hint="Name a trace or recorded shapes.")


def _check_unified(reports: Mapping[str, TableReport]) -> None:
    for name, report in reports.items():
        if not all(isinstance(bucket, UnifiedBucket) for bucket in report.buckets):
            raise ConfigError(
                f"trencadis buckets --unified: {name} has no table for unified passes.", hint="Try --strategy unified."
            )


def _limits(args: argparse.Namespace, config: Config) -> BucketLimits:
    block_size = args.block_size or config.cache.block_size or DEFAULT_BLOCK_SIZE
    max_model_len = args.max_model_len or config.model.max_model_len or DEFAULT_MAX_MODEL_LEN
    max_num_seqs = args.max_num_seqs or config.engine.max_num_seqs
    filled = max_num_seqs * -(-max_model_len // block_size)
    max_prefills = min(args.max_num_prefill_seqs, max_num_seqs)
    drafts = args.num_speculative_tokens
    return BucketLimits(
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens or config.engine.max_num_batched_tokens,
        max_prefill_batch_size=1 if args.merged_prefill else max_prefills,
        num_blocks=args.num_device_blocks or config.cache.num_blocks or filled,
        contiguous=args.contiguous,
        prefix_caching=not args.contiguous if args.prefix_caching is None else args.prefix_caching,
        max_draft_tokens=max_draft_tokens(config) if drafts is None else drafts,
        max_merged_prefills=max_prefills if args.merged_prefill else 1,
        unified=args.unified,
    )


def _names(args: argparse.Namespace, config: Config) -> dict[str, str]:
    """Return the names of the strategies, each with its source."""
    if args.compare:
        names = [name.strip() for name in args.compare.split(",") if name.strip()]
        if not names:
            raise ConfigError(f"trencadis buckets: --compare {args.compare!r} names no strategy.", hint="Write a,b,c.")
        return dict.fromkeys(names, "flag --compare")
    if args.strategy:
        return {args.strategy: "flag --strategy"}
    if args.action:
        return {FITTING: "trencadis buckets fit"}
    if config.bucketing.name == "auto":
        return {BUCKETING_BY_LAYOUT["unified" if args.unified else "padded"]: "default"}
    return {config.bucketing.name: args.resolved.sources["bucketing.name"]}


def _comment(args: argparse.Namespace, names: Mapping[str, str], limits: BucketLimits) -> str:
    """Return the comment of a bucket file; equal runs give equal comments."""
    trace = f", from {Path(args.trace).name}" if args.trace else ""
    facts = ", ".join(f"{key}={value}" for key, value in attrs.asdict(limits).items())
    return f"(batch size, query length, blocks) by trencadis buckets, strategy {next(iter(names))}{trace}\n{facts}"


def _write(file: Path, report: TableReport, comment: str) -> None:
    try:
        write_bucket_file(file, report.table, comment=comment)
    except ValueError as error:
        raise ConfigError(f"{file}: this table has no bucket file: {error}.", hint="Leave out -o.") from error
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error}.", hint="Give another path.") from error


def _print(args: argparse.Namespace, reports: Mapping[str, TableReport], limits: BucketLimits) -> None:
    if args.json:
        print(json.dumps(_compared(reports, limits) if args.compare else _single(*reports.values())))
        return
    if not args.compare:
        report = next(iter(reports.values()))
        if args.action and not args.output:
            print(bucket_file_text(report.table), end="")
            return
        if not args.output:
            buckets = (bucket for phase in Phase for bucket in report.of_phase(phase))
            rows = [(bucket.phase.value, *(str(size) for size in _sizes(bucket))) for bucket in buckets]
            print_table(("phase", *(_UNIFIED_SIZES if args.unified else _PADDED_SIZES)), rows)
            print()
    measured = next(iter(reports.values())).prompt_padding is not None
    phases = ("causal", "not causal") if args.unified else ("prompt", "decode")
    headings = ("strategy", *phases, "warm-up s", "graph GiB", *(_MEASURES if measured else ()))
    print_table(headings, [_row(name, report, measured=measured) for name, report in reports.items()])


def _row(name: str, report: TableReport, *, measured: bool) -> list[str]:
    sizes = [str(len(report.of_phase(phase))) for phase in Phase]
    cells = [name, *sizes, f"{report.warmup_s:.4g}", f"{report.graph_bytes / 2**30:.4g}"]
    if measured:
        values = [getattr(report, measure_name) for measure_name in _MEASURES]
        cells += [f"{value:.1%}" if isinstance(value, float) else str(value) for value in values]
    return cells


def _sizes(bucket: Bucket) -> list[int]:
    if isinstance(bucket, UnifiedBucket):
        return [bucket.query_len, bucket.num_blocks, bucket.num_unique_blocks, int(bucket.is_causal)]
    return [bucket.batch_size, bucket.query_len, bucket.num_blocks]


def _single(report: TableReport) -> dict[str, Any]:
    """Return the buckets, and their costs if a trace was given."""
    if any(isinstance(bucket, UnifiedBucket) for bucket in report.buckets):
        return {"unified": [_sizes(bucket) for bucket in report.buckets]}
    table: dict[str, Any] = {
        "prompt": [_sizes(bucket) for bucket in report.of_phase(Phase.PREFILL)],
        "decode": [_sizes(bucket) for bucket in report.of_phase(Phase.DECODE)],
    }
    return table if report.prompt_padding is None else table | {"report": _costs(report)}


def _compared(reports: Mapping[str, TableReport], limits: BucketLimits) -> dict[str, Any]:
    return {
        "limits": attrs.asdict(limits),
        "strategies": {name: _single(report) | {"report": _costs(report)} for name, report in reports.items()},
    }


def _costs(report: TableReport) -> dict[str, Any]:
    facts = attrs.asdict(
        report, filter=lambda field, value: field.name not in {"table", "covering"} and value is not None
    )
    return {"num_buckets": len(report.buckets), **facts}
