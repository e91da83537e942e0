"""What is aimed at, and whether the measurements reach it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from peers.catalogue import AGAIN, ENGINES, OURS, OWN, PRECISIONS

__all__ = ["GOALS", "Goal", "judge"]

Row = Mapping[str, Any]


@attrs.frozen(kw_only=True)
class Goal:
    """One aim.

    Attributes:
        text: What is aimed at.
        aim: The least value that meets it.
        precision: Of which runs.
        workload: Of which runs; empty for start-up.
        kind: ``best`` (ours by the best peer's tokens per CPU second), ``start`` (one peer's start-up time by
            ours), ``share`` (of the limit, CPU time).
        peer: For ``start``.
    """

    text: str
    aim: float
    precision: str
    workload: str = ""
    kind: str
    peer: str = ""


_AIMS = {"single": ("single stream", 1.15), "streams8": ("8 streams", 1.4), "batch32": ("batch of 32", 1.5)}
_PREFILLS = {"prefill1024": "prefill 1 × 1024", "prefill8x512": "prefill 8 × 512"}

GOALS = (
    *(
        Goal(
            text=f"{text} against the best peer, {precision}", aim=aim, precision=precision, workload=name, kind="best"
        )
        for precision in PRECISIONS
        for name, (text, aim) in _AIMS.items()
    ),
    *(
        Goal(text=f"{text} against the best peer, fp32", aim=1.3, precision="fp32", workload=name, kind="best")
        for name, text in _PREFILLS.items()
    ),
    Goal(text="start-up of vLLM by ours", aim=10.0, precision="fp32", kind="start", peer="vllm"),
    Goal(text="decode, batch 1, share of the limit", aim=0.7, precision="fp32", workload="single", kind="share"),
    Goal(text="decode, batch 8, share of the limit", aim=0.7, precision="fp32", workload="streams8", kind="share"),
    Goal(text="decode, batch 32, share of the limit", aim=0.7, precision="fp32", workload="batch32", kind="share"),
)


def judge(model: str, rows: Sequence[Row], starts: Sequence[Row]) -> list[dict[str, Any]]:
    """Return, for each goal, what was measured on a model.

    Returns:
        ``goal``, ``aim``, ``measured`` (None if it was not), ``met`` (likewise), ``by`` (how far above the aim, as a ratio; negative: below) and
        ``note``: against whom, within which noise, or why there is no measurement.
    """
    found = []
    for goal in GOALS:
        mine = [row for row in (starts if goal.kind == "start" else rows) if row["model"] == model]
        mine = [row for row in mine if row["precision"] == goal.precision and row.get("workload", "") == goal.workload]
        measured, note = _KINDS[goal.kind](goal, {row["engine"]: row for row in mine})
        found.append(
            {
                "goal": goal.text,
                "aim": goal.aim,
                "measured": measured,
                "met": None if measured is None else measured >= goal.aim,
                "by": None if measured is None else measured / goal.aim - 1,
                "note": note,
            }
        )
    return found


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
}
