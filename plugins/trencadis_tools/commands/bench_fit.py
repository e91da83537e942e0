"""``trencadis bench fit``: step times from recorded steps or from the times of requests, and how far they are from others."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from trencadis.api import Config, Registry
from trencadis.console import print_table
from trencadis.errors import ConfigError
from trencadis_tools.commands import bench_fit_requests

if TYPE_CHECKING:
    from trencadis_tools.simulation.step_times import Fit, KindErrors, StepRecord, StepRecords

__all__ = ["HELP", "add_arguments", "run"]

HELP = "step times of a simulated device from --records or --requests"

_UNITS = {
    "base_s": ("device, each step", "ms", 1e3),
    "token_s": ("device, each token", "µs", 1e6),
    "context_s": ("device, each KV entry read", "ns", 1e9),
    "product_s": ("device, each pair of prefill token and KV entry", "ns", 1e9),
    "row_s": ("device, each sequence", "µs", 1e6),
    "host_base_s": ("host, each step", "ms", 1e3),
    "host_row_s": ("host, each sequence", "µs", 1e6),
    "host_new_s": ("host, each admitted sequence", "µs", 1e6),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement; ``--json`` is shared."""
    group = parser.add_argument_group("fit")
    group.add_argument("--records", metavar="FILE", help="steps that the observer recorder wrote")
    group.add_argument(
        "--requests",
        metavar="FILE",
        help="lengths and times of requests that an engine configured as this one answered",
    )
    group.add_argument(
        "--sheet", metavar="S", default="", help="with --requests: step times to begin with, as for --step-times"
    )
    group.add_argument(
        "--held-out",
        metavar="FILE",
        help="other steps or requests, for the errors; of --requests also a share of the last ones (default: the last fifth)",
    )
    group.add_argument("--out", metavar="FILE", help="write the step times as JSON")
    group.add_argument("--by-bucket", action="store_true", help="a time for each bucket of a device with static shapes")
    group.add_argument(
        "--leave-out",
        metavar="A,B,...",
        default="",
        help=f"coefficients that are to be 0, of {', '.join(_UNITS)}; with --requests also prefill_token_s",
    )
    group.add_argument(
        "--warm-up", type=int, default=20, metavar="N", help="leave out the first so many steps (default: 20)"
    )
    group.add_argument(
        "--all-steps", action="store_true", help="let outliers count: mean times instead of typical ones"
    )
    group.add_argument("--device", metavar="NAME", default="", help="what the steps ran on, to be noted in --out")


def run(args: argparse.Namespace, config: Config, registry: Registry) -> int:
    """Fit and print; returns 0.

    Raises:
        ConfigError: Records or requests cannot be read, are too few, or do not tell some coefficients apart.
        TrencadisError: A policy failed in a simulation.
    """
    if bool(args.records) == bool(args.requests):
        raise ConfigError(
            "trencadis bench fit: needs one of --records and --requests.",
            hint='Record steps with observer.names = "recorder", or name a file with the times of requests.',
        )
    if args.requests:
        given = [flag for flag, value in (("--by-bucket", args.by_bucket), ("--all-steps", args.all_steps)) if value]
        if given:
            raise ConfigError(f"{', '.join(given)}: is for --records.", hint="Leave it out: requests tell no steps.")
        written = bench_fit_requests.run(args, config, registry)
    elif args.sheet:
        raise ConfigError("--sheet: is for --requests.", hint="Leave it out: recorded steps tell their times.")
    else:
        written = _fit_records(args)
    if args.out:
        _write(args.out, written)
    if args.json:
        print(json.dumps(written))
    return 0


def _fit_records(args: argparse.Namespace) -> dict[str, Any]:
    """Fit recorded steps and print; return the content of a step-time file."""
    from trencadis_tools.simulation.step_times import (
        fit_step_times,
        read_records,
        steady,
        step_time_errors,
        step_times_json,
    )

    if args.warm_up < 0:
        raise ConfigError(f"--warm-up is {args.warm_up}, which must be 0 or more.")
    records = read_records(args.records)
    steps = steady(records.steps, num_warm_up=args.warm_up)
    if args.held_out:
        held_out = steady(read_records(args.held_out).steps, num_warm_up=args.warm_up)
    else:
        steps, held_out = steps[: -(len(steps) // 5) or None], steps[len(steps) - len(steps) // 5 :]
    leave_out = [name.strip() for name in args.leave_out.split(",") if name.strip()]
    fit = fit_step_times(
        steps, leave_out=leave_out, by_bucket=args.by_bucket, robust=not args.all_steps, source=args.records
    )
    try:
        errors = step_time_errors(fit.times, held_out)
    except ValueError as error:
        raise ConfigError(f"{args.held_out or args.records}: {error}.") from error
    if not args.json:
        _print(fit, errors, records, steps)
    return step_times_json(fit.times, _facts(args, records, fit, errors))


def _facts(args: argparse.Namespace, records: StepRecords, fit: Fit, errors: dict[str, KindErrors]) -> dict[str, Any]:
    return {
        "standard_errors": {name: one.error for name, one in fit.coefficients.items()},
        "provenance": {
            "records": args.records,
            "held_out": args.held_out or "last fifth",
            "device": args.device,
            "num_steps": fit.num_steps,
            "num_outliers": fit.num_outliers,
            **records.measured,
        },
        "errors": {kind: attrs.asdict(one) for kind, one in errors.items()},
    }


def _write(path: str, written: dict[str, Any]) -> None:
    try:
        Path(path).write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be written: {error}.") from error


def _print(fit: Fit, errors: dict[str, KindErrors], records: StepRecords, steps: list[StepRecord]) -> None:
    from trencadis_tools.simulation.step_times import BucketStepTimes

    outliers = f"{fit.num_outliers} of them, slowed down by something else, without weight"
    model = records.measured.get("model", {}).get("architecture", "a model")
    print(f"{model} on {records.measured.get('processor', 'a device')}: {len(steps)} steps, {outliers}.")
    if isinstance(fit.times, BucketStepTimes):
        rows = [
            (bucket.phase.value, bucket.batch_size, bucket.query_len, bucket.num_blocks, f"{time_s * 1e3:.3f}")
            for bucket, time_s in sorted(fit.times.times_s.items(), key=lambda one: (one[0].phase.value, one[1]))
        ]
        print_table(("phase", "rows", "tokens of a row", "blocks", "ms"), [tuple(map(str, row)) for row in rows])
    print_table(
        ("time", "coefficient", "value", "standard error", "unit"),
        [
            (
                _UNITS[name][0],
                name,
                f"{one.value * _UNITS[name][2]:.4g}",
                f"{one.error * _UNITS[name][2]:.2g}",
                _UNITS[name][1],
            )
            for name, one in fit.coefficients.items()
        ],
    )
    print_table(
        ("held out", "steps", "device MAPE", "median", "sum", "with host MAPE", "sum"),
        [
            (
                kind,
                str(one.num_steps),
                *(f"{part:.1%}" for part in (one.device_mape, one.device_median)),
                f"{one.device_sum:+.1%}",
                f"{one.step_mape:.1%}",
                f"{one.step_sum:+.1%}",
            )
            for kind, one in errors.items()
        ],
    )
