"""Output files of a tuning: the configuration as TOML with reasons, and the evidence as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from trencadis.errors import ConfigError
from trencadis_tools.compare.record import plain, versions, workload_digest
from trencadis_tools.compare.wording import show
from trencadis_tools.tune.search import Effect
from trencadis_tools.tune.trials import Capacity, Trial
from trencadis_tools.tune.tune import Tuned

__all__ = ["FORMAT", "alone_words", "capacity_words", "evidence_of", "toml_of", "write_text"]

FORMAT = "trencadis tuning 1"


def capacity_words(capacity: Capacity) -> str:
    """Return a capacity in words. Pure."""
    if not capacity.rate:
        return "none"
    return f"{'' if capacity.beyond else 'at least '}{capacity.rate:.3g} requests/s"


def alone_words(tuned: Tuned, capacity: Capacity) -> str:
    """Return the effect of a change alone: on capacity, or on the strain if no rate keeps the objectives. Pure."""
    start = tuned.found.start
    if start.rate or capacity.rate:
        return f"{capacity_words(capacity)}, from {capacity_words(start)}"
    return f"{capacity.nearest.strain:.3g} times the limit, from {start.nearest.strain:.3g}"


# ------------------------------------------------------------------------------------------------------------ TOML


def toml_of(tuned: Tuned, command: str) -> str:
    """Return the best configuration as a complete file, with comments on changes and reasons. Pure.

    It contains no secrets.

    Args:
        tuned: Result of the tuning.
        command: Command line of the tuning.
    """
    found = tuned.found
    changes = found.best.changes
    values = {**tuned.start.given, **changes}
    reasons = {path: _reason(tuned, path) for path in changes}
    tables: dict[str, dict[str, Any]] = {}
    for path in sorted(values):
        table, _, key = path.rpartition(".")
        tables.setdefault(table, {})[key] = values[path]
    lines = [f"# {line}" for line in _head(tuned, command)]
    for table, keys in sorted(tables.items()):
        lines += ["", f"[{'.'.join(map(_key, table.split('.')))}]"]
        for key, value in keys.items():
            reason = reasons.get(f"{table}.{key}")
            lines += [f"# {reason}"] if reason else []
            lines.append(f"{_key(key)} = {_value(value)}")
    return "\n".join(lines) + "\n"


def _head(tuned: Tuned, command: str) -> list[str]:
    found, held_out = tuned.found, tuned.parts[-1]
    lines = [
        f"Found by: {command}",
        f"Objectives: {tuned.slo.text}. Workload: {tuned.settings.workload}; figures are of {held_out.name} than those searched with.",
        *([f"{tuned.left_out}."] if tuned.left_out else []),
        *([tuned.one_seed] if tuned.one_seed else []),
        f"Step times: {tuned.step_times}.",
        f"KV cache: {tuned.memory}.",
        f"Simulated capacity: {capacity_words(found.best)}; of the start: {capacity_words(found.start)}.",
    ]
    if tuned.settings.drafts:
        lines.append(f"Drafts: {tuned.settings.drafts}.")
    if not found.best.rate:
        lines.append("NO RATE KEEPS THE OBJECTIVES: this comes nearest.")
    if not found.best.changes:
        lines.append("Nothing that was tried is better than the start.")
    if tuned.not_measured:
        lines.append(f"Nothing was measured: {tuned.not_measured}.")
    for one in tuned.measured:
        values = ", ".join(f"{name} {show(value, _unit(name))}" for name, value in one.values.items())
        lines.append(f"Measured at {one.rate:.3g} requests/s, {one.name}: {values}.")
    return lines


def _unit(name: str) -> str:
    return "" if name == "goodput" else "s"


def _reason(tuned: Tuned, path: str) -> str:
    """Return the former value of an option and the effect of the change alone, in words. Pure."""
    before = next((effect.option.start for effect in tuned.found.effects if effect.option.path == path), None)
    alone = tuned.found.alone.get(path)
    if alone is None:
        return "Goes with the values that follow or precede it: measured step times and objectives, as the policy takes them."
    return f"Was {_value(before)}. Alone: {alone_words(tuned, alone)}."


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)


def _value(value: Any) -> str:
    """Return a value as TOML has it. Pure."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(str(key))} = {_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)


def write_text(file: Path, text: str, flag: str) -> None:
    """Write a file.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error}.", hint=f"Give another path to {flag}.") from error


# -------------------------------------------------------------------------------------------------------- evidence


def evidence_of(tuned: Tuned) -> dict[str, Any]:
    """Return all trials as plain values; everything except ``measured`` is reproducible. Pure."""
    found = tuned.found
    tuning = {
        "settings": attrs.asdict(tuned.settings),
        "start": {"given": tuned.start.given, "plan_hash": tuned.start.plan_hash},
        "step_times": {"from": tuned.step_times, "model": tuned.step_times_facts},
        "kv_cache": tuned.memory,
        "parts": [
            {
                "name": part.name,
                "seed": part.seed,
                "num_requests": len(part.requests),
                "digest": workload_digest(part),
            }
            for part in tuned.parts
        ],
        "left_out": tuned.left_out,
        "stages": [{"stage": stage, "num_simulations": number} for stage, number in found.stages],
        "capacities": {
            "start": _capacity(found.start),
            "best": _capacity(found.best),
            "second": _capacity(found.second) if found.second else None,
            "alone": {path: _capacity(one) for path, one in found.alone.items()},
        },
        "at_best": [_trial(trial) for trial in found.at_best],
        "effects": [_effect(effect) for effect in found.effects],
        "trials": [_trial(trial) for trial in tuned.trials.trials.values()],
        "refused": [{"changes": changes, "why": why} for changes, why in tuned.trials.refused],
    }
    measured = [attrs.asdict(one) for one in tuned.measured]
    written: dict[str, Any] = plain(
        {
            "format": FORMAT,
            "made_with": versions(),
            "tuning": tuning,
            "measured": measured,
            "not_measured": tuned.not_measured,
        }
    )
    return written


def _trial(trial: Trial) -> dict[str, Any]:
    return attrs.asdict(trial) | {"keeps": trial.keeps}


def _capacity(capacity: Capacity) -> dict[str, Any]:
    return {
        "changes": capacity.changes,
        "rate": capacity.rate,
        "is_at_least": capacity.beyond is None,
        "nearest": _trial(capacity.nearest),
    }


def _effect(effect: Effect) -> dict[str, Any]:
    tried: Sequence[dict[str, Any]] = [{"value": value, "strain": trial.strain} for value, trial in effect.tried]
    return {
        "option": effect.option.path,
        "start": effect.option.start,
        "rate": effect.base.rate,
        "strain": effect.base.strain,
        "tried": tried,
        "matters": effect.matters,
    }
