"""What is aimed at, and whether the measurements reach it. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from peers.catalogue import AGAIN, ENGINES, OURS, OWN, PRECISIONS, PUBLISHED
from peers.shapes import SHAPES
from peers.starts import GENERATE, SERVE

__all__ = ["GOALS", "Goal", "judge", "judge_commands"]

Row = Mapping[str, Any]


@attrs.frozen(kw_only=True)
class Goal:
    """One aim.

    Attributes:
        text: What is aimed at.
        aim: The least value that meets it, or the largest.
        at_most: It is the largest.
        precision: Of which runs.
        workload: Of which runs; empty for a start.
        kind: ``best`` (ours by the best peer's tokens per CPU second), ``start`` (one peer's start by ours), ``share`` (of the limit, CPU
            time), ``first`` (our CPU seconds to the first token), ``memory`` (ours at its highest while loading, MiB).
        peer: For ``start``.
        files: For ``first``: in memory (``warm``) or not (``cold``).
    """

    text: str
    aim: float
    at_most: bool = False
    precision: str
    workload: str = ""
    kind: str
    peer: str = ""
    files: str = "warm"

    def is_met(self, measured: float) -> bool:
        """Return whether a value meets it."""
        return measured <= self.aim if self.at_most else measured >= self.aim


_AIMS = {"single": ("single stream", 1.15), "streams8": ("8 streams", 1.4), "batch32": ("batch of 32", 1.5)}
_PREFILLS = {"prefill1024": ("prefill 1 × 1024", 1.3), "prefill8x512": ("prefill 8 × 512", 1.3)}
_PUBLISHED = {"single": ("single stream", 1.1), "streams8": ("8 streams", 2.0)}


def _against_the_best(precision: str, aims: Mapping[str, tuple[str, float]]) -> Iterator[Goal]:
    for name, (text, aim) in aims.items():
        yield Goal(
            text=f"{text} against the best peer, {precision}", aim=aim, precision=precision, workload=name, kind="best"
        )


GOALS = (
    *(goal for precision in PRECISIONS for goal in _against_the_best(precision, _AIMS | _PREFILLS)),
    Goal(text="first token, int8, CPU s", aim=4.0, at_most=True, precision="int8", kind="first"),
    Goal(text="start-up of vLLM by ours", aim=10.0, precision="fp32", kind="start", peer="vllm"),
    Goal(text="decode, batch 1, share of the limit", aim=0.7, precision="fp32", workload="single", kind="share"),
    Goal(text="decode, batch 8, share of the limit", aim=0.7, precision="fp32", workload="streams8", kind="share"),
    Goal(text="decode, batch 32, share of the limit", aim=0.7, precision="fp32", workload="batch32", kind="share"),
    *_against_the_best(PUBLISHED, _PUBLISHED),
    Goal(text="first token, CPU s", aim=4.0, at_most=True, precision=PUBLISHED, kind="first"),
    Goal(text="first token, cold, CPU s", aim=12.0, at_most=True, precision=PUBLISHED, kind="first", files="cold"),
    Goal(text="highest memory while loading, MiB", aim=600.0, at_most=True, precision=PUBLISHED, kind="memory"),
)
COMMANDS = {GENERATE: 3.5, SERVE: 4.5}
"""CPU seconds of the commands with the demo model, at most."""


def judge(model: str, rows: Sequence[Row], starts: Sequence[Row]) -> list[dict[str, Any]]:
    """Return, for each goal of a model's precisions, what was measured on it.

    Returns:
        ``goal``, ``aim``, ``at_most``, ``measured`` (None if it was not), ``met`` (likewise), ``by`` (how far above the aim, as a ratio;
        negative: below) and ``note``: against whom, within which noise, or why there is no measurement.
    """
    found = []
    for goal in GOALS:
        if (goal.precision == PUBLISHED) != SHAPES[model].is_published:
            continue
        mine = [row for row in (rows if goal.workload else starts) if row["model"] == model]
        mine = [row for row in mine if row["precision"] == goal.precision]
        if goal.workload:
            mine = [row for row in mine if row["workload"] == goal.workload]
        else:
            mine = [row for row in mine if row["files"] == goal.files]
        found.append(_verdict(goal, *_KINDS[goal.kind](goal, {row["engine"]: row for row in mine})))
    return found


def judge_commands(starts: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the same for the commands.

    Args:
        starts: ``command``, ``cpu_s`` of each start.
    """
    found = []
    for command, aim in COMMANDS.items():
        cpu_s = [start["cpu_s"] for start in starts if start["command"] == command]
        until = "to the end" if command == GENERATE else "until it is ready"
        goal = Goal(text=f"`{command}` {until}, CPU s", aim=aim, at_most=True, precision="", kind="command")
        measured = statistics.median(cpu_s) if cpu_s else None
        found.append(_verdict(goal, measured, f"the demo, {len(cpu_s)} times" if cpu_s else "not measured"))
    return found


def _verdict(goal: Goal, measured: float | None, note: str) -> dict[str, Any]:
    return {
        "goal": goal.text,
        "aim": goal.aim,
        "at_most": goal.at_most,
        "measured": measured,
        "met": None if measured is None else goal.is_met(measured),
        "by": None if measured is None else measured / goal.aim - 1,
        "note": note,
    }


def _best(goal: Goal, rows: Mapping[str, Row]) -> tuple[float | None, str]:
    ratios = {name: row["ratio"]["median"] for name, row in rows.items() if name not in OWN and row["ratio"]}
    if not ratios:
        return None, "not measured: no peer was measured beside ours"
    best = min(ratios, key=lambda name: ratios[name])
    return ratios[best], f"the best is {ENGINES[best].label}; {_noise(rows)}"


def _start(goal: Goal, rows: Mapping[str, Row]) -> tuple[float | None, str]:
    missing = [ENGINES[name].label for name in (OURS, goal.peer) if name not in rows]
    if missing:
        return None, f"not measured: {' and '.join(missing)} did not start"
    ours, theirs = rows[OURS], rows[goal.peer]
    return theirs["wall_s"] / ours["wall_s"], f"wall time; of CPU time {theirs['cpu_s'] / ours['cpu_s']:.1f}"


def _first(goal: Goal, rows: Mapping[str, Row]) -> tuple[float | None, str]:
    return _of_ours("cpu_s", 1.0, rows)


def _memory(goal: Goal, rows: Mapping[str, Row]) -> tuple[float | None, str]:
    return _of_ours("peak_rss", 2.0**20, rows)


def _of_ours(name: str, unit: float, rows: Mapping[str, Row]) -> tuple[float | None, str]:
    if OURS not in rows:
        return None, "not measured: ours did not start"
    others = {ENGINES[other].label: row[name] / unit for other, row in rows.items() if other not in OWN}
    return rows[OURS][name] / unit, "; ".join(f"{label} {value:.3g}" for label, value in others.items())


def _share(goal: Goal, rows: Mapping[str, Row]) -> tuple[float | None, str]:
    row = rows.get(OURS)
    if row is None or not row["share"]:
        return None, "not measured: ours was not"
    shares = {name: other["share"]["median"] for name, other in rows.items() if name not in OWN and other["share"]}
    note = f"of wall time {row['wall_share']['median']:.2f}" if row["wall_share"] else "CPU time"
    if shares:
        best = max(shares, key=lambda name: shares[name])
        note += f"; the best peer, {ENGINES[best].label}, reaches {shares[best]:.2f}"
    return row["share"]["median"], note


def _noise(rows: Mapping[str, Row]) -> str:
    again = rows.get(AGAIN)
    if again is None or not again["ratio"]:
        return "no A/A pair"
    return f"A/A {again['ratio']['median']:.2f} ({again['ratio']['low']:.2f} to {again['ratio']['high']:.2f})"


_KINDS: dict[str, Callable[[Goal, Mapping[str, Row]], tuple[float | None, str]]] = {
    "best": _best,
    "start": _start,
    "share": _share,
    "first": _first,
    "memory": _memory,
}
