"""``trencadis replay``: replay the schedule of a flight record step by step, or with other settings."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from trencadis.console import print_table, track
from trencadis.errors import ConfigError
from trencadis.files import read_bytes
from trencadis_tools.recorder.flight_record import (
    FlightRecord,
    RecordedAttempt,
    RecordedEvent,
    decode_flight_record,
    int32s,
)

if TYPE_CHECKING:
    from trencadis.api import Config, Registry
    from trencadis_tools.replay import ReplayedSteps, Served

__all__ = ["DIFFERS", "add_arguments", "run_alone"]

DIFFERS = 1
"""Exit code if a replay differs from the recorded schedule."""

_MAX_SHOWN = 12
MAX_FILE_BYTES = 2**27
_COLUMNS = {
    "name": "policy",
    "num_requests": "requests",
    "ttft_mean_s": "TTFT s",
    "ttft_p99_s": "p99",
    "tpot_mean_s": "TPOT s",
    "tpot_p99_s": "p99",
    "e2e_mean_s": "E2E s",
    "e2e_p99_s": "p99",
    "num_preempted": "preempted",
    "num_cached_tokens": "cached",
    "duration_s": "all in s",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags."""
    parser.epilog = (
        "Flags of the configuration change the recorded one: trencadis replay DUMP --scheduling.name shortest_first serves the "
        "recorded requests with both, on a simulated device."
    )
    parser.add_argument("record", metavar="DUMP", help="flight record of an engine: *.flight")
    parser.add_argument(
        "--step-times",
        metavar="FILE",
        help="with other settings: how long steps take, a file of bench fit --out or a device sheet (default: as recorded)",
    )
    parser.add_argument(
        "--drafts",
        default="",
        metavar="D",
        help="with other settings and a speculator: how often a draft is right, such as 0.7, or a TOML file",
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help="import what the record names by import path, and go on where plugins are others than recorded; a record can then run any "
        "code: only for files of your own",
    )
    parser.add_argument("--show", action="store_true", help="print what the record holds, and replay nothing")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_alone(args: argparse.Namespace, flags: Sequence[str]) -> int:
    """Replay and print; returns 0, or ``DIFFERS`` where a plan is not the recorded one.

    Raises:
        ConfigError: The file is not a record or cannot be replayed, or a flag cannot be used.
        PluginError: A plugin that was recorded is not installed, or cannot be used.
    """
    path = Path(args.record)
    try:
        data = read_bytes(path, max_bytes=MAX_FILE_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: {getattr(error, 'strerror', None) or error}.", hint="Name a flight record: *.flight."
        ) from error
    record = decode_flight_record(data, name=str(path))
    facts = _facts(record)
    if args.show:
        print(json.dumps(facts) if args.json else "\n".join(f"{name}: {value}" for name, value in facts.items()))
        return 0

    from trencadis_tools.replay import check_code, check_replayable, replay_exactly

    check_replayable(record, name=str(path))
    config, registry = _recorded(record, args)
    check_code(record, config, registry, name=str(path), may_import=args.trust)
    with track("Replaying", total=len(record.events), unit="events") as advance:
        replayed = replay_exactly(record, config, registry, name=str(path), may_import=args.trust, note=advance)
    if replayed.difference is not None or not flags:
        _print_replayed(record, replayed, facts, as_json=args.json)
        return 0 if replayed.difference is None else DIFFERS
    served = _served(record, replayed, list(flags), args)
    if args.json:
        print(json.dumps(facts | {"equal_steps": replayed.num_steps, "served": [_plain(one) for one in served]}))
    else:
        print(f"The schedule is equal in all {replayed.num_steps} steps. On a simulated device:")
        print_table(list(_COLUMNS.values()), [[_shown(getattr(one, name)) for name in _COLUMNS] for one in served])
    return 0


def _served(record: FlightRecord, replayed: ReplayedSteps, flags: list[str], args: argparse.Namespace) -> list[Served]:
    """Return the results of the requests as recorded, and as simulated with the recorded and with other settings."""
    from trencadis_tools.replay import recorded_latencies, recorded_step_times, replay_with
    from trencadis_tools.simulation import load_drafts
    from trencadis_tools.simulation.step_times import load_step_times

    recorded, registry = _recorded(record, args)
    other, other_registry = _recorded(record, args, flags)
    drafts = load_drafts(args.drafts)
    times = (
        load_step_times(args.step_times) if args.step_times else recorded_step_times(replayed.steps, name=args.record)
    )
    is_other_policy = other.scheduling.name != recorded.scheduling.name
    served = [recorded_latencies(record)]
    for name, config, own in (
        (f"{recorded.scheduling.name}, simulated", recorded, registry),
        (other.scheduling.name if is_other_policy else " ".join(flags), other, other_registry),
    ):
        with track(f"Simulating {name}", total=len(record.requests), unit="requests") as advance:
            served.append(
                replay_with(
                    record,
                    config,
                    own,
                    step_times=times,
                    name=name,
                    recorded=recorded,
                    drafts=drafts,
                    may_import=args.trust,
                    note=advance,
                )
            )
    return served


def _recorded(
    record: FlightRecord, args: argparse.Namespace, flags: list[str] | None = None
) -> tuple[Config, Registry]:
    """Return the recorded configuration with the flags of this command line, and the plugins that are not blocked."""
    from trencadis_tools.replay import recorded_config

    own = args.config_file.tree.get("plugins")
    return recorded_config(record, flags, name=str(Path(args.record)), may_import=args.trust, plugins=own)


def _facts(record: FlightRecord) -> dict[str, Any]:
    return {
        "reason": record.reason,
        "cause": record.cause,
        "written_at": record.written_at,
        "version": record.version,
        "plan_hash": record.plan_hash,
        "components": {path.removesuffix(".name"): code[0] for path, code in record.components.items()},
        "num_steps": record.num_steps,
        "num_requests": len(record.requests),
        "begins": "in mid-run" if record.frame is not None else "with the engine",
        "obstacles": record.obstacles,
    }


def _print_replayed(record: FlightRecord, replayed: ReplayedSteps, facts: dict[str, Any], *, as_json: bool) -> None:
    found = replayed.difference
    if as_json:
        shown = None
        if found is not None:
            shown = {
                "event": found.event,
                "recorded": _words(record, found.recorded),
                "replayed": _words(record, found.replayed),
                "cause": found.cause,
            }
        print(json.dumps(facts | {"equal_steps": replayed.num_steps, "difference": shown}))
    elif found is None:
        print(f"The schedule is equal in all {replayed.num_steps} steps.")
    else:
        print(f"The schedule is equal in {replayed.num_steps} steps, and then differs:")
        print(f"  recorded: {_words(record, found.recorded)}")
        print(f"  replayed: {found.cause or _words(record, found.replayed)}")


def _words(record: FlightRecord, event: RecordedEvent | None) -> str:
    """Return an event in words; a plan is shown with its first sequences."""
    if event is None:
        return "nothing"
    if not isinstance(event, RecordedAttempt):
        return f"{type(event).__name__.removeprefix('Recorded').lower()} at {event.now_s:.6f} s"
    if not event.is_plan:
        return f"no plan, with {event.num_waiting} waiting and {event.num_free_blocks} blocks free"
    slots, starts, counts = (int32s(data).tolist() for data in (event.slots, event.starts, event.counts))
    parts = [f"slot {slot}: {count} from {start}" for slot, start, count in zip(slots, starts, counts, strict=True)]
    more = f" and {len(parts) - _MAX_SHOWN} more" if len(parts) > _MAX_SHOWN else ""
    rest = "".join(
        f"; {name} {list(values)}"
        for name, values in (("admitted", event.admitted), ("preempted", event.preempted))
        if values
    )
    return (
        f"step {event.step}: {', '.join(parts[:_MAX_SHOWN])}{more}{rest}; {event.num_waiting} waiting, "
        f"{event.num_free_blocks} blocks free"
    )


def _plain(one: Served) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and math.isnan(value) else value
        for name, value in attrs.asdict(one).items()
    }


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return str(value)
