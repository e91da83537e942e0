"""The record of a comparison: arguments, results, and everything needed to reproduce it byte by byte.

The part ``comparison`` holds no times and no machine names: the same command gives the same bytes. ``made_with`` and ``locks`` hold
versions and file digests.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import attrs

import trencadis
from trencadis.errors import ConfigError
from trencadis.files import read_json
from trencadis_tools.compare.candidates import Candidate
from trencadis_tools.compare.experiment import PointResult, rate_of
from trencadis_tools.compare.wording import outcome_notes, sentence
from trencadis_tools.lock import PlanLock, differences, lock_from, lock_of
from trencadis_tools.workloads import Workload

__all__ = [
    "FORMAT",
    "changes_since",
    "check_code",
    "comparison_bytes",
    "differences_between",
    "plain",
    "read_record",
    "record_of",
    "versions",
    "workload_digest",
    "write_record",
]

FORMAT = "trencadis comparison 1"
_SHOWN = 20


def workload_digest(workload: Workload) -> str:
    """Return BLAKE2b-128 over all fields of a workload's requests. Pure."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr((workload.block_tokens, workload.seed)).encode())
    for request in workload.requests:
        digest.update(repr(attrs.astuple(request)).encode())
    return digest.hexdigest()


def record_of(arguments: Mapping[str, Any], step_times: str, results: Sequence[PointResult]) -> dict[str, Any]:
    """Return the record as plain values.

    Args:
        arguments: Arguments from which the comparison can be repeated.
        step_times: Model of step times in words; empty for a measurement.
        results: Results of all points.
    """
    return {
        "format": FORMAT,
        "made_with": versions(),
        "comparison": plain(
            {"arguments": arguments, "step_times": step_times, "points": [_point(result) for result in results]}
        ),
    }


def versions() -> dict[str, str]:
    """Return the versions of the software that makes a record."""
    found = {"trencadis": trencadis.__version__, "python": platform.python_version()}
    for name in ("numpy", "scipy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ""
    return found


def _point(result: PointResult) -> dict[str, Any]:
    judgement = result.judgement
    growing = [outcome.name for outcome in judgement.outcomes if outcome.backlog.is_growing]
    effects = []
    for effect in judgement.effects:
        plain = attrs.asdict(effect)
        del plain["sequence"]  # follows from the differences
        plain["effect"] = effect.relative(effect.interval.difference)
        plain["words"] = sentence(effect, judgement.outcomes[0].name, growing)
        effects.append(plain)
    return {
        "rate": result.point.rate,
        "swept": result.point.swept,
        "workloads": [
            {
                "seed": workload.seed,
                "num_requests": len(workload.requests),
                "rate": rate_of(workload),
                "digest": workload_digest(workload),
            }
            for workload in result.workloads
        ],
        "num_warm_up": judgement.num_warm_up,
        "outcomes": [
            attrs.asdict(outcome) | {"plan_hash": candidate.plan_hash, "is_unstable": outcome.backlog.is_growing}
            for outcome, candidate in zip(judgement.outcomes, result.candidates, strict=True)
        ],
        "effects": effects,
        "notes": outcome_notes(result),
    }


def plain(value: Any) -> Any:
    """Return a value as JSON has it: NaN and infinite numbers become null. Pure."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def comparison_bytes(record: Mapping[str, Any], *, plan_hashes: bool = True) -> bytes:
    """Return the part ``comparison`` of a record as bytes of the file. Pure.

    Args:
        record: Record, read from a file or made.
        plan_hashes: False: omit plan hashes, which change with any line of the plugins' packages.
    """
    comparison = record["comparison"]
    if not plan_hashes:
        points = [
            {**point, "outcomes": [_unhashed(one) for one in point["outcomes"]]} for point in comparison["points"]
        ]
        comparison = {**comparison, "points": points}
    return json.dumps(comparison, indent=1, ensure_ascii=False).encode()


def _unhashed(outcome: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in outcome.items() if name != "plan_hash"}


def locks_of(candidates: Sequence[Candidate]) -> dict[str, PlanLock]:
    """Return the lock of each configuration: versions, plugins, digests of their files and of the model's. Reads these files."""
    return {one.name: lock_of(one.config, one.registry) for one in candidates}


def changes_since(record: Mapping[str, Any], candidates: Sequence[Candidate]) -> list[str]:
    """Return the differences to the locks of a record, in words; empty if the record holds no locks.

    Args:
        record: Record read from a file.
        candidates: Configurations as resolved here.

    Raises:
        ConfigError: A lock in the record has another form.
    """
    locked = _locks_in(record)
    now = locks_of([one for one in candidates if one.name in locked])
    return [f"{name}: {line}" for name, lock in now.items() for line in differences(locked[name], lock)]


def _locks_in(record: Mapping[str, Any]) -> dict[str, PlanLock]:
    try:
        return {name: lock_from(lock) for name, lock in record.get("locks", {}).items()}
    except (AttributeError, ValueError) as error:
        raise ConfigError(f"the locks of the record cannot be read: {error}.") from error


def check_code(record: Mapping[str, Any], candidates: Sequence[Candidate]) -> None:
    """Refuse a record made with components that differ in name or code from those installed here, or without locks.

    Args:
        record: Record read from a file.
        candidates: Configurations of the record, as resolved here.

    Raises:
        ConfigError: A component differs; the message names it.
    """
    now = locks_of(candidates)
    locked = _locks_in(record)
    lines = [
        f"{name}: {line}"
        for name, lock in now.items()
        for line in (_differences_of_code(locked[name], lock) if name in locked else ["the record holds no lock of it"])
    ]
    if lines:
        shown = [*lines[:_SHOWN], *(["and more"] if len(lines) > _SHOWN else [])]
        raise ConfigError(
            "it was made with other components than are installed here, or does not say with which:"
            + "".join(f"\n  {line}" for line in shown)
            + "\n",
            hint="Install those; or run it with what is here, which may give other numbers: add --trust.",
        )


def _differences_of_code(locked: PlanLock, here: PlanLock) -> list[str]:
    """Return in words which components and files differ, regardless of options. Pure."""
    as_set = attrs.evolve(
        here,
        plan_hash=locked.plan_hash,
        versions=locked.versions,
        settings=locked.settings,
        model=locked.model,
        tokenizer=locked.tokenizer,
    )
    return differences(locked, as_set)


def write_record(file: Path, record: Mapping[str, Any], candidates: Sequence[Candidate]) -> None:
    """Write a record with the lock of each configuration.

    Args:
        file: Output file.
        record: Record to write.
        candidates: Configurations of the record.

    Raises:
        ConfigError: The file cannot be written.
    """
    whole = {**record, "locks": {name: attrs.asdict(lock) for name, lock in locks_of(candidates).items()}}
    try:
        file.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error}.", hint="Give another path to --json.") from error


def read_record(file: Path) -> dict[str, Any]:
    """Return a record.

    Raises:
        ConfigError: The file cannot be read, or is not a record.
    """
    try:
        record = read_json(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}.", hint="Name a file that --json wrote.") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ConfigError(f'{file}: is no record with the format "{FORMAT}".', hint="Name a file that --json wrote.")
    return record


def differences_between(before: Any, after: Any) -> list[str]:
    """Return where two plain values differ, the first twenty places in words. Pure."""
    found: list[str] = []
    for path, one, two in _differing(before, after, ""):
        if len(found) == _SHOWN:
            return [*found, "and more"]
        found.append(f"{path}: {_short(one)} in the record, {_short(two)} now")
    return found


def _differing(before: Any, after: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys([*before, *after]):
            yield from _differing(before.get(key), after.get(key), f"{path}.{key}" if path else key)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (one, two) in enumerate(zip(before, after, strict=True)):
            yield from _differing(one, two, f"{path}[{index}]")
    elif before != after:
        yield path, before, after


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
