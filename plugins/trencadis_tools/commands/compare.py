"""``trencadis compare``: configurations on the same requests, simulated or measured, with a verdict for each metric."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from trencadis.api import Config, Registry
from trencadis.console import print_table, track
from trencadis.errors import ConfigError, ImportPathRefusedError
from trencadis_tools.commands.lines import say
from trencadis_tools.commands.rate import add_rate
from trencadis_tools.compare.candidates import candidates_of
from trencadis_tools.compare.comparison import Arguments, Comparison, arguments_from, candidates_in, compare
from trencadis_tools.compare.decisions import decision_notes
from trencadis_tools.compare.metrics import DEFAULT_METRICS, METRIC_FORMS, metric_of
from trencadis_tools.compare.plots import check_plots
from trencadis_tools.compare.record import (
    changes_since,
    check_code,
    comparison_bytes,
    differences_between,
    read_record,
    write_record,
)
from trencadis_tools.compare.report import write_report
from trencadis_tools.compare.requests_file import check_requests_file, write_requests
from trencadis_tools.compare.wording import outcome_notes, sentence, table_of
from trencadis_tools.simulation.fleet import notes_on

__all__ = ["CAN_BE_LOCKED", "add_arguments", "run"]

CAN_BE_LOCKED = False

_FILES = ("out", "requests", "json", "verify")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags."""
    parser.add_argument(
        "configs",
        nargs="*",
        metavar="CONFIG",
        help="TOML files, the baseline first; where there is no such file, scheduling policies such as fcfs",
    )
    parser.add_argument("--workload", metavar="W", help="a workload file, a trace, or the name of a built-in one")
    parser.add_argument("--max-requests", type=int, default=0, metavar="N", help="the first N of it (default: all)")
    parser.add_argument("--replicas", type=int, default=1, metavar="N", help="simulated engines behind [router]")
    parser.add_argument("--step-times", default="", metavar="S", help="fitted step times, or a device sheet")
    parser.add_argument(
        "--drafts",
        default="",
        metavar="D",
        help="with a speculator: how often a draft is right, such as 0.7, or a TOML file",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        default=0,
        metavar="N",
        help="runs of a workload that is drawn, or pieces of a trace with --live (default: 10; with --until-decided at most 200)",
    )
    parser.add_argument("--until-decided", action="store_true", help="stop as soon as every metric is decided")
    parser.add_argument("--live", action="store_true", help="measure real engines in turns instead of simulating")
    parser.add_argument(
        "--metric", default=DEFAULT_METRICS, metavar="A,B,...", help=f"{METRIC_FORMS} (default: {DEFAULT_METRICS})"
    )
    parser.add_argument(
        "--sweep", action="append", default=[], metavar="TABLE.KEY=A,B,...", help="compare at each value of a setting"
    )
    add_rate(parser, several=True)
    parser.add_argument("--no-sensitivity", action="store_true", help="do not try verdicts with other step times")
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="write a report, one file with plots")
    parser.add_argument("--requests", type=Path, metavar="FILE", help="write a row for each request, .csv or .parquet")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a record that --verify takes")
    parser.add_argument("--verify", type=Path, metavar="FILE", help="run a record again and compare bytes")
    parser.add_argument(
        "--trust",
        action="store_true",
        help="with --verify: run it with other components than it was made with, and import what it names by import path, which can run any code",
    )


def run(args: argparse.Namespace, config: Config, registry: Registry) -> int:
    """Compare and print; returns 0, or 1 if a verified record gives other bytes.

    Raises:
        ConfigError: An argument, file or configuration cannot be used, or the workload is too short.
        TrencadisError: A run failed.
    """
    if args.verify is not None:
        return _verify(args)
    arguments = _arguments(args)
    if args.out is not None:
        check_plots()
    if args.requests is not None:
        check_requests_file(args.requests)
    comparison = _compare(arguments, warn=_warn, may_import=True)
    _print(comparison)
    command = _command(args)
    if args.json is not None:
        write_record(args.json, comparison.record, comparison.candidates)
    if args.requests is not None:
        write_requests(args.requests, comparison.results)
    if args.out is not None:
        write_report(args.out, comparison, command=command)
    return 0


def _compare(arguments: Arguments, warn: Callable[[str], None] | None = None, *, may_import: bool) -> Comparison:
    with track("Comparing", unit="runs") as advance:
        return compare(arguments, note=advance, warn=warn, may_import=may_import)


def _warn(line: str) -> None:
    print(f"note: {line}", file=sys.stderr, flush=True)


def _arguments(args: argparse.Namespace) -> Arguments:
    if not args.workload:
        raise ConfigError(
            "trencadis compare: --workload is missing.", hint="Name a workload file, a trace or a built-in."
        )
    names = [name.strip() for name in args.metric.split(",") if name.strip()]
    for name in names:
        metric_of(name)
    candidates = candidates_of(args.configs, base=args.config, overrides=_overrides(args))
    return Arguments(
        configs=[(candidate.name, candidate.given) for candidate in candidates],
        workload=args.workload,
        step_times=args.step_times,
        replicas=args.replicas,
        seeds=args.seeds,
        until_decided=args.until_decided,
        live=args.live,
        metrics=names,
        rates=args.rate,
        sweep=args.sweep,
        max_requests=args.max_requests,
        sensitivity=not args.no_sensitivity,
        drafts=args.drafts,
    )


def _overrides(args: argparse.Namespace) -> dict[str, object]:
    """Return the values set by config flags, which apply to every configuration."""
    resolved = args.resolved
    return {path: resolved.values[path] for path, source in resolved.sources.items() if source.startswith("flag ")}


def _print(comparison: Comparison) -> None:
    print_table(*table_of(comparison.results))
    for result in comparison.results:
        outcomes = result.judgement.outcomes
        growing = [outcome.name for outcome in outcomes if outcome.backlog.is_growing]
        print(f"\nAt {result.point}:" if str(result.point) else "")
        for effect in result.judgement.effects:
            say(sentence(effect, outcomes[0].name, growing))
        for note in [*decision_notes(result), *outcome_notes(result)]:
            say(note)
    if not comparison.arguments.live:
        for candidate in comparison.candidates:
            for note in notes_on(candidate.config):
                say(f"{candidate.name}: {note}")


def _command(args: argparse.Namespace) -> str:
    """Return the command line without its output files."""
    words: list[str] = ["trencadis", "compare", *args.configs]
    if args.config is not None:
        words += ["--config", str(args.config)]
    for name, value in vars(args).items():
        if name in {"configs", "config", "resolved", "traceback", "trust", *_FILES} or not value:
            continue
        flag = f"--{name.replace('_', '-')}"
        for one in value if isinstance(value, list) and name != "rate" else [value]:
            words += [flag] if one is True else [flag, _text(one)]
    words += [f"--{path.replace('_', '-')}={_text(value)}" for path, value in _overrides(args).items()]
    return shlex.join(words)


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return ",".join(map(_text, value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)


def _verify(args: argparse.Namespace) -> int:
    """Run a record again; print differences and return 1 if there are any, else 0."""
    if args.configs:
        raise ConfigError("flag --verify: the record names what is compared.", hint="Leave configurations out.")
    record = read_record(args.verify)
    try:
        arguments = arguments_from(record["comparison"]["arguments"])
        comparison_bytes(record, plan_hashes=False)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{args.verify}: its arguments cannot be read: {error}.") from error
    if arguments.live:
        raise ConfigError(
            f"{args.verify}: is a measurement, which no second one equals to the byte.",
            hint="Measure again with the command in its report, and compare the verdicts.",
        )
    try:
        if not args.trust:
            check_code(record, candidates_in(arguments))
        again = _compare(arguments, may_import=args.trust)
    except ImportPathRefusedError as error:
        raise ImportPathRefusedError(
            f"{args.verify}: {str(error).removesuffix(error.hint).strip()}",
            hint="If you trust the file as you trust your own code, add --trust: what it names is imported and run.",
        ) from None
    except ConfigError as error:
        raise ConfigError(
            f"{args.verify}: {str(error).removesuffix(error.hint).rstrip(' ')}", hint=error.hint
        ) from error
    if comparison_bytes(again.record) == comparison_bytes(record):
        print(f"{args.verify}: the same bytes.")
        return 0
    if comparison_bytes(again.record, plan_hashes=False) == comparison_bytes(record, plan_hashes=False):
        print(f"{args.verify}: the same numbers. The hashes of plans differ: code has changed since.")
        return 0
    print(f"{args.verify}: not the same.")
    for difference in differences_between(record["comparison"], again.record["comparison"]):
        print(difference)
    for change in changes_since(record, again.candidates):
        print(change)
    return 1
