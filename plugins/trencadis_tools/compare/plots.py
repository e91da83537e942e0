"""Plots of a comparison as SVG for a page; equal data give equal bytes."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trencadis.records import FloatArray
from trencadis_tools.compare.experiment import PointResult
from trencadis_tools.compare.judge import MARGIN, Effect
from trencadis_tools.compare.metrics import Metric, metric_of
from trencadis_tools.lab import library
from trencadis_tools.simulation import RequestRecord

__all__ = ["cdf_plot", "check_plots", "differences_plot", "effects_plot", "line_plot", "sequence_plot"]

_MARKERS = "os^Dv*PX"
_STYLES = ("-", "--", "-.", ":")
_LATENCIES: dict[str, Callable[[RequestRecord], float]] = {
    "TTFT": lambda record: record.ttft_s,
    "TPOT": lambda record: record.tpot_s,
    "E2E": lambda record: record.e2e_s,
}
_SHARES = np.linspace(0, 1, 201)
_MOST_TICKS = 6


def check_plots() -> None:
    """Check before any run that plots can be drawn.

    Raises:
        ConfigError: matplotlib is missing.
    """
    library("matplotlib", purpose="flag --out: a report with plots")


def _picture(draw: Callable[[Any], None], *, num_columns: int = 1, width: float = 7.0, height: float = 3.2) -> str:
    """Return the SVG of a figure."""
    matplotlib = library("matplotlib", purpose="a report with plots")
    figures = library("matplotlib.figure", purpose="a report with plots")
    with matplotlib.rc_context({"svg.hashsalt": "trencadis", "svg.fonttype": "none", "font.size": 9}):
        figure = figures.Figure(figsize=(width, height), layout="constrained")
        draw(figure.subplots(1, num_columns))
        stream = io.StringIO()
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    # Only the SVG element is used; the page has its name and text alternative.
    svg = stream.getvalue()[stream.getvalue().index("<svg") :]
    return re.sub(r"<svg ", '<svg aria-hidden="true" ', svg, count=1)


def _style(index: int) -> dict[str, Any]:
    """Return colour and line style of one configuration; line styles differ as well."""
    return {"color": f"C{index}", "linestyle": _STYLES[index % len(_STYLES)]}


def cdf_plot(result: PointResult) -> str:
    """Return cumulative distributions of TTFT, TPOT and E2E over all runs, for configurations whose backlog does not grow."""
    outcomes = result.judgement.outcomes

    def draw(axes: Any) -> None:
        for place, (name, value) in zip(axes, _LATENCIES.items(), strict=True):
            for index, (outcome, runs) in enumerate(zip(outcomes, result.runs, strict=True)):
                values = np.array([value(record) for run in runs for record in run.records], np.float64)
                values = values[np.isfinite(values) & (values > 0)]
                if len(values) and not outcome.backlog.is_growing:
                    place.plot(np.quantile(values, _SHARES), _SHARES, label=outcome.name, **_style(index))
            _log_ticks(place)
            place.set_xlabel(f"{name}, s")
            place.set_ylim(0, 1)
            place.grid(alpha=0.3)
        axes[0].set_ylabel("share of requests")
        if axes[-1].get_lines():
            axes[-1].legend()

    return _picture(draw, num_columns=len(_LATENCIES), width=10)


def _log_ticks(axes: Any) -> None:
    """Label a logarithmic axis with 0.01, 0.02, 0.05, 0.1 and so on; fewer labels over many decades, equal distances within one."""
    ticker = library("matplotlib.ticker", purpose="a report with plots")
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    powers = 10.0 ** np.arange(np.floor(np.log10(low)), np.ceil(np.log10(high)) + 1)
    for steps in ([1, 2, 5], [1, 3], [1]):
        ticks = (powers[:, None] * steps).ravel()
        ticks = ticks[(ticks >= low) & (ticks <= high)]
        if len(ticks) <= _MOST_TICKS:
            break
    ticks = ticks[:: -(-len(ticks) // _MOST_TICKS) or 1]
    axes.xaxis.set_minor_locator(ticker.LogLocator(subs=range(1, 10), numticks=100))
    axes.xaxis.set_major_locator(ticker.FixedLocator(ticks) if len(ticks) > 2 else ticker.MaxNLocator(4))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())


def _whole_ticks(axes: Any) -> None:
    """Place ticks at whole numbers only."""
    ticker = library("matplotlib.ticker", purpose="a report with plots")
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))


def effects_plot(results: Sequence[PointResult]) -> str:
    """Return every effect in per cent of the baseline with its 95 % interval, the first one on top; empty if none has an interval."""
    shown = [
        (str(result.point), effect)
        for result in results
        for effect in result.judgement.effects
        if effect.verdict != "unstable" and np.isfinite(effect.relative(effect.interval.high))
    ]
    if not shown:
        return ""
    others = list(dict.fromkeys(effect.other for _, effect in shown))
    baseline = results[0].judgement.outcomes[0].name

    def draw(axes: Any) -> None:
        axes.axvspan(-100 * MARGIN, 100 * MARGIN, color="0.9", label=f"within {100 * MARGIN:g} %")
        axes.axvline(0, color="black", linewidth=1.0, label=f"{baseline}: 0 %")
        labelled: set[str] = set()
        for place, (_, effect) in enumerate(shown):
            low, middle, high = (100 * effect.relative(value) for value in _ends(effect))
            index = others.index(effect.other) + 1
            label = effect.other if effect.other not in labelled else None
            labelled.add(effect.other)
            style = {"color": f"C{index}", "marker": _MARKERS[index % len(_MARKERS)], "markersize": 5}
            axes.errorbar(middle, place, xerr=[[middle - low], [high - middle]], capsize=3, label=label, **style)
        axes.set_yticks(range(len(shown)), [", ".join(filter(None, (effect.metric, at))) for at, effect in shown])
        axes.set_ylim(len(shown) - 0.5, -0.5)
        axes.set_xlabel(f"difference from {baseline}, %")
        axes.grid(axis="x", alpha=0.3)
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))

    return _picture(draw, width=8, height=max(1.8, 1.0 + 0.3 * len(shown)))


def _ends(effect: Effect) -> tuple[float, float, float]:
    return effect.interval.low, effect.interval.difference, effect.interval.high


def differences_plot(effect: Effect, baseline: str) -> str:
    """Return the paired differences of the units in their order, with their mean and its interval."""

    def draw(axes: Any) -> None:
        interval = effect.interval
        factor, unit = _unit(metric_of(effect.metric), [*effect.differences, interval.low, interval.high])
        numbers = np.arange(1, len(effect.differences) + 1)
        axes.axhline(0, color="black", linewidth=0.8, label=f"{baseline}: 0")
        axes.plot(numbers, factor * np.array(effect.differences), "o", markersize=3, color="C0", label="pair")
        axes.axhline(factor * interval.difference, color="C1", label="difference")
        if np.isfinite(interval.low):
            low, high = factor * interval.low, factor * interval.high
            axes.axhspan(low, high, color="C1", alpha=0.2, label="95 % interval")
        _whole_ticks(axes)
        axes.set_xlabel("pair")
        axes.set_ylabel(f"{effect.metric}: {effect.other} − {baseline}{unit}")
        axes.legend()

    return _picture(draw)


def sequence_plot(effect: Effect, baseline: str) -> str:
    """Return the confidence sequence of an effect, pair after pair."""

    def draw(axes: Any) -> None:
        points = [point for point in effect.sequence if np.isfinite(point.low)]
        factor, unit = _unit(metric_of(effect.metric), [end for point in points for end in (point.low, point.high)])
        axes.axhline(0, color="black", linewidth=0.8, label=f"{baseline}: 0")
        means = [factor * point.difference for point in effect.sequence]
        axes.plot([point.num_pairs for point in effect.sequence], means, color="C0", label="mean")
        axes.fill_between(
            [point.num_pairs for point in points],
            [factor * point.low for point in points],
            [factor * point.high for point in points],
            alpha=0.2,
            color="C0",
            label="95 % at all times",
        )
        for point in points:  # a single point has a band without width
            axes.plot([point.num_pairs] * 2, [factor * point.low, factor * point.high], "_", color="C0")
        _whole_ticks(axes)
        axes.set_xlabel("pairs")
        axes.set_ylabel(f"{effect.metric}: {effect.other} − {baseline}{unit}")
        axes.legend()

    return _picture(draw)


def line_plot(results: Sequence[PointResult], metric: Metric, *, xs: Sequence[float | str], label: str) -> str:
    """Return a plot of a metric over rates or values of a setting; unstable points are crosses at the upper edge.

    Args:
        results: Results of the points, in the order of ``xs``.
        metric: Metric to plot.
        xs: Numbers, or texts that are drawn at equal distances.
        label: Label of the horizontal axis.
    """
    all_values = [outcome.values[metric.name] for result in results for outcome in result.judgement.outcomes]
    factor, unit = _unit(metric, all_values)

    def draw(axes: Any) -> None:
        for index, candidate in enumerate(results[0].candidates):
            outcomes = [result.judgement.outcomes[index] for result in results]
            hidden = np.array([metric.is_latency and outcome.backlog.is_growing for outcome in outcomes])
            values: FloatArray = np.array([outcome.values[metric.name] for outcome in outcomes], np.float64)
            places = np.array(xs) if all(isinstance(x, int | float) for x in xs) else np.arange(len(xs))
            style = {**_style(index), "marker": _MARKERS[index % len(_MARKERS)]}
            axes.plot(places, np.where(hidden, np.nan, factor * values), label=candidate.name, **style)
            edge = [0.97 - 0.05 * index] * int(hidden.sum())
            note = f"{candidate.name}: unstable"
            if hidden.any():
                axes.plot(
                    places[hidden], edge, "x", color=f"C{index}", transform=axes.get_xaxis_transform(), label=note
                )
            if places.dtype.kind == "i" and not isinstance(xs[0], int | float):
                axes.set_xticks(places, xs)
            elif len(places) <= _MOST_TICKS:
                axes.set_xticks(places, [f"{x:g}" for x in places])
        shown = [factor * value for value in all_values if value > 0]
        axes.set_ylim(0, 1.1 * max(shown) if shown else None)
        axes.set_xlabel(label)
        axes.set_ylabel(f"{metric.name}{unit}")
        axes.grid(alpha=0.3)
        axes.legend()

    return _picture(draw)


def _unit(metric: Metric, values: Sequence[float]) -> tuple[float, str]:
    """Return the factor for values and the unit suffix of the axis label; seconds below 1 become milliseconds, as in tables."""
    finite = np.array(values, np.float64)
    finite = np.abs(finite[np.isfinite(finite)])
    if metric.unit == "s" and len(finite) and finite.max() < 1:
        return 1000.0, ", ms"
    return 1.0, f", {metric.unit}" if metric.unit else ""
