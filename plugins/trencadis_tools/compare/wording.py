"""Effects in words and in table cells, for terminal and report."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trencadis_tools.compare.experiment import PointResult
from trencadis_tools.compare.judge import MARGIN, Effect
from trencadis_tools.compare.metrics import metric_of

__all__ = ["outcome_notes", "sentence", "share", "show", "table_of"]


def show(value: float, unit: str = "") -> str:
    """Return a value with three significant digits and its unit; seconds below 1 become milliseconds. Pure."""
    if math.isnan(value):
        return "-"
    if unit == "s" and abs(value) < 1:
        return f"{1000 * value:.3g} ms"
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{text} {unit}".rstrip()


def share(value: float) -> str:
    """Return a share in per cent, with its sign. Pure."""
    return "-" if not math.isfinite(value) else f"{100 * value:+.1f} %"


def _range(effect: Effect) -> str:
    low, high = effect.relative(effect.interval.low), effect.relative(effect.interval.high)
    return f"{share(low)} to {share(high)}" if math.isfinite(low) and math.isfinite(high) else "none"


def table_of(results: Sequence[PointResult]) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows of a table with a row for each effect; latencies of a configuration with growing backlog are omitted. Pure.

    With two configurations, each has a column of values; with more, each row names the one compared with the baseline. With one
    point, the point is not shown.

    Args:
        results: Results of all points.
    """
    names = [outcome.name for outcome in results[0].judgement.outcomes]
    is_pair, has_points = len(names) == 2, any(str(result.point) for result in results)
    values = names if is_pair else [names[0], "other", "value"]
    headings = [*(["at"] if has_points else []), "metric", *values, "effect", "95 % interval", "verdict"]
    rows = []
    for result in results:
        for effect in result.judgement.effects:
            baseline, other = _values(result, effect)
            at = [str(result.point) or "-"] if has_points else []
            beside = [other] if is_pair else [effect.other, other]
            rows.append([*at, effect.metric, baseline, *beside, *_verdict(effect)])
    return headings, rows


def _values(result: PointResult, effect: Effect) -> list[str]:
    """Return the values of the baseline and of the other configuration."""
    metric, outcomes = metric_of(effect.metric), {outcome.name: outcome for outcome in result.judgement.outcomes}
    both = ((result.judgement.outcomes[0], effect.baseline_value), (outcomes[effect.other], effect.other_value))
    return [
        "unstable" if metric.is_latency and outcome.backlog.is_growing else show(value, metric.unit)
        for outcome, value in both
    ]


def _verdict(effect: Effect) -> list[str]:
    """Return size, interval and verdict."""
    if effect.verdict == "unstable":
        return ["-", "-", effect.verdict]
    verdict = f"better: {effect.winner}" if effect.winner else effect.verdict
    return [share(effect.relative(effect.interval.difference)), _range(effect), verdict]


def sentence(effect: Effect, baseline: str, growing: Sequence[str] = ()) -> str:
    """Return an effect as a sentence. Pure.

    Args:
        effect: Effect to describe.
        baseline: Name of the baseline.
        growing: Names of the configurations whose backlog grows.
    """
    metric, other = effect.metric, effect.other
    if effect.verdict == "unstable":
        own = [name for name in (baseline, other) if name in growing]
        steady = "".join(f" {name} keeps up." for name in (baseline, other) if name not in growing)
        return (
            f"{metric}: no value. {' and '.join(own)}: unstable, capacity exceeded or run too short to settle.{steady}"
        )
    difference = effect.interval.difference
    if math.isnan(difference):
        return f"{metric}: open. No request has a value under both {baseline} and {other}."
    direction = "higher" if difference > 0 else "lower"
    relative = effect.relative(difference)
    size = f"{100 * abs(relative):.1f} %" if math.isfinite(relative) else show(abs(difference), metric_of(metric).unit)
    found = (
        f"{size} {direction} under {other} than under {baseline}"
        if difference
        else f"the same under {other} and {baseline}"
    )
    found += f" (95 % interval {_range(effect)})"
    if effect.verdict == "better":
        return f"{metric}: {effect.winner} is better. It is {found}."
    if effect.verdict == "equal":
        return f"{metric}: equal within {100 * MARGIN:g} %. It is {found}."
    why = "; ".join(effect.reasons) or (
        "the runs do not decide it"
        if math.isfinite(effect.interval.low)
        else f"no interval from {effect.interval.method}"
    )
    return f"{metric}: open, {why}. It is {found}."


def outcome_notes(result: PointResult) -> list[str]:
    """Return notes on the runs: growing backlogs, failed requests, warm-up. Pure."""
    notes = []
    for outcome in result.judgement.outcomes:
        backlog = outcome.backlog
        if backlog.is_growing:
            notes.append(
                f"{outcome.name}: unstable, capacity exceeded. Its backlog grows by {100 * backlog.growth:.1f} requests of every 100 "
                f"that arrive (p = {backlog.p_value:.2g}); latencies would grow with the length of the run."
            )
        if outcome.num_failed:
            notes.append(
                f"{outcome.name}: {outcome.num_failed} of {outcome.num_requests} requests were refused or failed."
            )
    num_cut, num_all = sum(result.judgement.num_warm_up), result.judgement.outcomes[0].num_requests
    if num_cut:
        notes.append(
            f"Warm-up: {num_cut} of {num_all} requests are left out, the same under every configuration (MSER-5)."
        )
    if result.judgement.tried:
        notes.append(
            f'Sensitivity: every "better" was tried again with step times of {", ".join(result.judgement.tried)}.'
        )
    return notes
