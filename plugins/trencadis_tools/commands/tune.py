"""``trencadis tune``: find the configuration that serves the largest rate of a workload within objectives, with evidence."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

from trencadis.api import Config, Registry
from trencadis.console import print_table, track
from trencadis.errors import ConfigError
from trencadis_tools.compare.candidates import described
from trencadis_tools.compare.wording import show
from trencadis_tools.lab import scipy_stats
from trencadis_tools.simulation.drafts import speculates
from trencadis_tools.simulation.fleet import notes_on
from trencadis_tools.tune.search import SPANS, Effect, Found
from trencadis_tools.tune.slo import FORM, parse_slo
from trencadis_tools.tune.trials import Trial
from trencadis_tools.tune.tune import Settings, Tuned, tune
from trencadis_tools.tune.written import alone_words, capacity_words, evidence_of, toml_of, write_text

__all__ = ["add_arguments", "run"]

_SHOWN = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags; config flags and ``--config`` define the start of the search."""
    parser.add_argument(
        "--slo",
        metavar="A,B,...",
        help=f"objectives: {FORM}; itl is every time between tokens, tpot the mean of a request",
    )
    parser.add_argument("--workload", metavar="W", help="a workload file, a trace, or the name of a built-in one")
    parser.add_argument(
        "--step-times", default="", metavar="S", help="fitted step times, or a device sheet (default: fitted here)"
    )
    parser.add_argument(
        "--drafts",
        default="",
        metavar="D",
        help="with a speculator: how often a draft is right, such as 0.7, or a TOML file",
    )
    parser.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="that requests to search with are drawn from, the next one for those to check with (default: the workload's)",
    )
    parser.add_argument("--replicas", type=int, default=1, metavar="N", help="simulated engines behind [router]")
    parser.add_argument(
        "--budget",
        type=int,
        default=100,
        metavar="N",
        help="simulations of the search (default: 100); the last figures take some more",
    )
    parser.add_argument(
        "--limit",
        type=int,
        default=500,
        metavar="N",
        help="requests to search with, and as many others to check with (default: 500)",
    )
    parser.add_argument(
        "--keep", default="", metavar="A,B,...", help="options or tables that stay as they are, such as scheduling"
    )
    parser.add_argument("--no-confirm", action="store_true", help="do not measure the best two and the start")
    parser.add_argument("--out", type=Path, metavar="FILE.toml", help="write the best configuration")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was tried")


def run(args: argparse.Namespace, config: Config, registry: Registry) -> int:
    """Tune and print; returns 0, or 1 if no rate keeps the objectives.

    Raises:
        ConfigError: An argument, the workload or the starting configuration cannot be used.
        TrencadisError: The engine cannot be built, or a policy failed.
    """
    for flag in ("slo", "workload"):
        if not getattr(args, flag):
            hint = (
                "Write ttft_p99=1s,itl_p99=100ms." if flag == "slo" else "Name a workload file, a trace or a built-in."
            )
            raise ConfigError(f"trencadis tune: --{flag} is missing.", hint=hint)
    parse_slo(args.slo)
    scipy_stats()  # before anything is measured
    settings = Settings(
        slo=args.slo,
        workload=args.workload,
        step_times=args.step_times,
        replicas=args.replicas,
        budget=args.budget,
        limit=args.limit,
        confirm=not args.no_confirm,
        drafts=args.drafts,
        seed=args.seed,
        keep=[path.strip() for path in args.keep.split(",") if path.strip()],
    )
    with track("Tuning", total=args.budget, unit="simulations") as advance:
        tuned = tune(
            settings,
            described("start", args.resolved, registry),
            note=lambda done: advance(done, max(done, args.budget)),  # the final check comes on top
            say=print,
        )
    _print(tuned)
    if args.out is not None:
        write_text(args.out, toml_of(tuned, _command(args)), "--out")
    if args.json is not None:
        write_text(args.json, json.dumps(evidence_of(tuned), indent=1, ensure_ascii=False) + "\n", "--json")
    return 0 if tuned.found.best.rate else 1


def _print(tuned: Tuned) -> None:
    found = tuned.found
    searched, held_out = tuned.parts[-2], tuned.parts[-1]
    print(
        f"Workload {tuned.settings.workload}: the {searched.name} requests to search with, {held_out.name} for the figures."
    )
    if tuned.left_out:
        print(f"{tuned.left_out}.")
    if tuned.one_seed:
        print(tuned.one_seed)
    print(f"Step times: {tuned.step_times}.\nKV cache: {tuned.memory}.")
    num_refused = len(tuned.trials.refused)
    refused = f"; candidates that no engine can be built with: {num_refused}" if num_refused else ""
    print(f"{tuned.trials.num_run} simulations{refused}.")
    if speculates(tuned.start.config):
        print(f"Drafts: {tuned.settings.drafts}.")
    for note in notes_on(tuned.start.config):
        print(note)
    print()
    _print_capacities(tuned)
    _print_changes(tuned)
    _print_effects(found)
    _print_measured(tuned)


def _print_capacities(tuned: Tuned) -> None:
    found = tuned.found
    if not found.best.rate:
        print("No rate keeps the objectives, however far requests are apart. What comes nearest:")
    limits = {limit.name: limit.limit_s for limit in tuned.slo.limits}
    names = list(found.at_best[0].values)
    rate = found.best.nearest.rate
    headings = ["simulated", "capacity", f"at {rate:.3g}/s: attainment", *(f"{name}" for name in names)]
    has_buckets = any(trial.num_buckets for trial in found.at_best)
    capacities = [found.start, found.best, *([found.second] if found.second else [])]
    rows = [
        [
            name,
            capacity_words(capacity),
            f"{trial.attainment:.1%}",
            *(_of_limit(trial, one, limits.get(one)) for one in names),
            *([str(trial.num_buckets)] if has_buckets else []),
        ]
        for name, capacity, trial in zip(("start", "best", "second"), capacities, found.at_best, strict=False)
    ]
    print_table([*headings, *(["buckets to prepare"] if has_buckets else [])], rows)
    if not found.best.beyond:
        print("The requests are too few for a limit: all of them may come at once. Search with more (--limit).")
    elif found.best.nearest.spans < SPANS:
        print(
            f"At its capacity requests come for {found.best.nearest.came_s:.3g} s, and each takes {found.best.nearest.e2e_mean_s:.3g} s: these are "
            "capacities for a burst. Search with more requests (--limit)."
        )


def _of_limit(trial: Trial, name: str, limit_s: float | None) -> str:
    value = trial.values[name]
    if limit_s is None:
        return f"{value:.2%}"
    return f"{show(value, 's')}{'' if value <= limit_s else ' (too long)'}"


def _print_changes(tuned: Tuned) -> None:
    found = tuned.found
    if not found.best.changes:
        print("\nNothing that was tried is better than the start: leave it as it is.")
        return
    print()
    starts = {effect.option.path: effect.option.start for effect in found.effects}
    rows = [
        [path, str(starts[path]), str(found.best.changes[path]), alone_words(tuned, alone)]
        for path, alone in found.alone.items()
    ]
    print_table(["changed", "start", "best", "when changed alone"], rows)
    brought = [path for path in found.best.changes if path not in found.alone]
    if brought:
        print(f"With them, from step times and objectives: {', '.join(brought)}.")


def _print_effects(found: Found) -> None:
    matter = sorted((one for one in found.effects if one.matters), key=_most)
    if matter:
        print()
        rows = [
            [
                one.option.path,
                str(one.option.start),
                f"{one.base.strain:.3g}",
                ", ".join(f"{value}: {trial.strain:.3g}" for value, trial in sorted(one.tried, key=_by_strain)[:4]),
            ]
            for one in matter[:_SHOWN]
        ]
        print_table(["matters", "start", "largest value / limit", "others: the best first"], rows)
    without = [one.option.path for one in found.effects if not one.matters]
    if without:
        print(f"\nWithout effect here, left as they are: {', '.join(without)}.")


def _by_strain(one: tuple[object, Trial]) -> tuple[float, float, float]:
    return one[1].score


def _most(effect: Effect) -> float:
    """Return a sort key that is smaller the more an option improves the strain."""
    return min(trial.strain for _, trial in effect.tried) / effect.base.strain


def _print_measured(tuned: Tuned) -> None:
    if tuned.not_measured:
        print(f"\nNothing was measured: {tuned.not_measured}.")
        return
    names = list(tuned.measured[0].values)
    print()
    rows = [
        [
            one.name,
            f"{one.num_kept} of {len(one.runs)} runs",
            f"{one.attainment:.1%}",
            *(f"{one.values[name]:.2%}" if name == "goodput" else show(one.values[name], "s") for name in names),
        ]
        for one in tuned.measured
    ]
    head = [f"measured at {tuned.measured[0].rate:.3g}/s", "objectives kept in", "attainment", *names]
    print_table(head, rows)


def _command(args: argparse.Namespace) -> str:
    """Return the command line without its output files."""
    words = ["trencadis", "tune", "--slo", args.slo, "--workload", args.workload]
    if args.config is not None:
        words += ["--config", str(args.config)]
    for name in ("step_times", "drafts", "replicas", "budget", "limit", "keep"):
        words += [f"--{name.replace('_', '-')}", str(getattr(args, name))] if getattr(args, name) else []
    words += [] if args.seed is None else ["--seed", str(args.seed)]
    resolved = args.resolved
    for path, source in resolved.sources.items():
        if source.startswith("flag "):
            words.append(f"--{path.replace('_', '-')}={_text(resolved.values[path])}")
    return shlex.join([*words, *(["--no-confirm"] if args.no_confirm else [])])


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
