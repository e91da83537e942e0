"""``trencadis bench schedule``: scheduling policies on one workload, on a simulated device."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from trencadis.api import Config, Registry
from trencadis.console import print_table
from trencadis.errors import ConfigError, ConfigValueError
from trencadis_tools.commands.rate import add_rate

if TYPE_CHECKING:
    from trencadis_tools.bench import ScheduleResult

__all__ = ["HELP", "add_arguments", "run"]

HELP = "latencies under scheduling policies on --workload, on a simulated device"

_NO_DRAFTS = (
    "The policies run without drafts here: trencadis simulate --drafts and trencadis compare --drafts have them."
)

_WORKLOAD = {
    "num_tenants": ("N", "drawn where the workload tells none; tenant k has a share in proportion to 1 / (k + 1)"),
    "num_priorities": ("N", "drawn where the workload tells none; 0 is the most urgent"),
    "shared_prefix": ("N", "a tenant's prompts begin with the same so many tokens"),
    "ttft_target_s": ("S", "of requests that have none, for goodput"),
    "tpot_target_s": ("S", "of requests that have none, for goodput"),
    "num_blocks": ("N", "of the KV cache, unless cache.num_blocks is set"),
}
_STEP_TIME = {
    "base_s": "of every step",
    "token_s": "of every token in it",
    "context_token_s": "of every KV entry that attention reads",
}
_COLUMNS = {
    "policy": "policy",
    "ttft_mean_s": "TTFT s",
    "ttft_p99_s": "p99",
    "urgent_ttft_p99_s": "urgent p99",
    "tpot_mean_s": "TPOT s",
    "tpot_p99_s": "p99",
    "e2e_mean_s": "E2E s",
    "e2e_p99_s": "p99",
    "goodput": "goodput/s",
    "num_preempted": "preempted",
    "recompute_ratio": "recomputed",
    "service_gap": "service gap",
    "num_refused": "refused",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement; ``--policies``, ``--seed`` and ``--json`` are shared."""
    from trencadis.records import StepTime
    from trencadis_tools.bench import ScheduleWorkload

    group = parser.add_argument_group("schedule")
    defaults = attrs.asdict(ScheduleWorkload())
    group.add_argument("--workload", metavar="W", help="a workload file, a trace, or the name of a built-in one")
    add_rate(group)
    _add(group, "--max-requests", "limit", defaults["limit"], "N", "the first N of the workload")
    for name, (letter, text) in _WORKLOAD.items():
        _add(group, f"--{name.replace('_', '-')}", name, defaults[name], letter, text)
    for name, value in attrs.asdict(StepTime()).items():
        _add(group, f"--step-{name.replace('_', '-')}", f"step_{name}", value, "S", f"time {_STEP_TIME[name]}, seconds")


def _add(group: argparse._ArgumentGroup, flag: str, dest: str, default: float, letter: str, text: str) -> None:
    text = f"{text} (default: {default:g})"
    group.add_argument(flag, dest=dest, type=type(default), default=default, metavar=letter, help=text)


def run(args: argparse.Namespace, config: Config, registry: Registry) -> int:
    """Measure and print; returns 0.

    Raises:
        ConfigError: The workload cannot be read, or a flag makes no sense.
        PluginError: A policy does not exist or cannot be built.
        StepFailedError: A policy broke its contract.
    """
    from trencadis.records import StepTime
    from trencadis_tools.bench import ScheduleWorkload, measure_schedule
    from trencadis_tools.simulation.drafts import speculates
    from trencadis_tools.simulation.fleet import notes_on

    if args.trace:
        raise ConfigError("flag --trace: is for bench eviction.", hint=f"Write --workload {args.trace}.")
    if not args.workload:
        raise ConfigError(
            "trencadis bench schedule: --workload is missing.", hint="Name a workload file, a trace or a built-in."
        )
    try:
        taken = ScheduleWorkload(
            seed=args.seed, rate=args.rate or 0.0, limit=args.limit, **{name: getattr(args, name) for name in _WORKLOAD}
        )
        step_time = StepTime(**{name: getattr(args, f"step_{name}") for name in _STEP_TIME})
    except ValueError as error:
        raise ConfigValueError(f"trencadis bench schedule: {error}.") from error
    workload = taken.load(args.workload)
    names = [name.strip() for name in args.policies.split(",")] if args.policies else registry.components("scheduling")
    for name in names:  # here the source of the name is known
        registry.select("scheduling", name, source="flag --policies", may_import=True)
    results = [
        measure_schedule(config, registry, workload, policy=name, num_blocks=taken.num_blocks, step_time=step_time)
        for name in names
    ]
    notes = (*notes_on(config), *([_NO_DRAFTS] if speculates(config) else []))
    if args.json:
        facts = {"trace": args.workload, "workload": attrs.asdict(taken), "step_time": attrs.asdict(step_time)}
        print(json.dumps(facts | {"notes": notes, "results": [attrs.asdict(result) for result in results]}))
    else:
        _print(results)
        for note in notes:
            print(note)
    return 0


def _print(results: Sequence[ScheduleResult]) -> None:
    rows = [[_show(getattr(result, name)) for name in _COLUMNS] for result in results]
    print_table(list(_COLUMNS.values()), rows)


def _show(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return str(value)
