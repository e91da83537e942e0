"""Pictures of a comparison, as SVG to be put into a page: the same data give the same bytes."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trencadis.records import FloatArray
from trencadis_tools.compare.experiment import PointResult
from trencadis_tools.compare.judge import Effect
from trencadis_tools.compare.metrics import Metric, metric_of
from trencadis_tools.lab import library
from trencadis_tools.simulation import RequestRecord

__all__ = ["cdf_plot", "check_plots", "differences_plot", "line_plot", "sequence_plot"]

_MARKERS = "os^Dv*PX"
_STYLES = ("-", "--", "-.", ":")
_LATENCIES: dict[str, Callable[[RequestRecord], float]] = {
    "TTFT": lambda record: record.ttft_s,
    "TPOT": lambda record: record.tpot_s,
    "E2E": lambda record: record.e2e_s,
}
_SHARES = np.linspace(0, 1, 201)


def check_plots() -> None:
    """Refuse pictures that could not be drawn, before anything is run.

    Raises:
        ConfigError: matplotlib is missing.
    """
    library("matplotlib", purpose="flag --out: a report with plots")


def _picture(draw: Callable[[Any], None], *, num_columns: int = 1, width: float = 7.0) -> str:
    """Return the SVG of a figure."""
    matplotlib = library("matplotlib", purpose="a report with plots")
    figures = library("matplotlib.figure", purpose="a report with plots")
    with matplotlib.rc_context({"svg.hashsalt": "trencadis", "svg.fonttype": "none", "font.size": 9}):
        figure = figures.Figure(figsize=(width, 3.2), layout="constrained")
        draw(figure.subplots(1, num_columns))
        stream = io.StringIO()
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    # A page takes the element alone. Its name and text alternative stand in the page.
    svg = stream.getvalue()[stream.getvalue().index("<svg") :]
    return re.sub(r"<svg ", '<svg aria-hidden="true" ', svg, count=1)


def _style(index: int) -> dict[str, Any]:
    """Return how one configuration is drawn: told apart without colours too."""
    return {"color": f"C{index}", "linestyle": _STYLES[index % len(_STYLES)]}


def cdf_plot(result: PointResult) -> str:
    """Return the shares of requests by TTFT, TPOT and E2E, all runs together, of configurations whose backlog does not grow."""
    outcomes = result.judgement.outcomes

    def draw(axes: Any) -> None:
        for place, (name, value) in zip(axes, _LATENCIES.items(), strict=True):
            for index, (outcome, runs) in enumerate(zip(outcomes, result.runs, strict=True)):
                values = np.array([value(record) for run in runs for record in run.records], np.float64)
                values = values[np.isfinite(values) & (values > 0)]
                if len(values) and not outcome.backlog.is_growing:
                    place.plot(np.quantile(values, _SHARES), _SHARES, label=outcome.name, **_style(index))
            place.set_xscale("log")
            place.set_xlabel(f"{name}, s")
            place.set_ylim(0, 1)
            place.grid(alpha=0.3)
        axes[0].set_ylabel("share of requests")
        if axes[-1].get_lines():
            axes[-1].legend()

    return _picture(draw, num_columns=len(_LATENCIES), width=10)


def differences_plot(effect: Effect, baseline: str) -> str:
    """Return the paired differences of the units in their order, with their mean and its interval."""

    def draw(axes: Any) -> None:
        numbers = np.arange(1, len(effect.differences) + 1)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.plot(numbers, effect.differences, "o", markersize=3, color="C0", label="pair")
        axes.axhline(effect.interval.difference, color="C1", label="difference")
        if np.isfinite(effect.interval.low):
            axes.axhspan(effect.interval.low, effect.interval.high, color="C1", alpha=0.2, label="95 % interval")
        axes.set_xlabel("pair")
        axes.set_ylabel(_axis(metric_of(effect.metric), f"{effect.other} − {baseline}"))
        axes.legend()

    return _picture(draw)


def sequence_plot(effect: Effect, baseline: str) -> str:
    """Return the confidence sequence of an effect, pair after pair."""

    def draw(axes: Any) -> None:
        points = [point for point in effect.sequence if np.isfinite(point.low)]
        numbers = [point.num_pairs for point in points]
        axes.axhline(0, color="black", linewidth=0.8)
        axes.plot(
            [p.num_pairs for p in effect.sequence], [p.difference for p in effect.sequence], color="C0", label="mean"
        )
        axes.fill_between(
            numbers, [p.low for p in points], [p.high for p in points], alpha=0.2, color="C0", label="95 % at all times"
        )
        axes.set_xlabel("pairs")
        axes.set_ylabel(_axis(metric_of(effect.metric), f"{effect.other} − {baseline}"))
        axes.legend()

    return _picture(draw)


def line_plot(results: Sequence[PointResult], metric: Metric, *, xs: Sequence[float | str], label: str) -> str:
    """Return a metric of every configuration over rates or values of a setting; unstable points are crosses at the upper edge.

    Args:
        results: Of the points, in the order of ``xs``.
        metric: Which.
        xs: Numbers, or texts that are drawn at equal distances.
        label: Of the horizontal axis.
    """

    def draw(axes: Any) -> None:
        for index, candidate in enumerate(results[0].candidates):
            outcomes = [result.judgement.outcomes[index] for result in results]
            hidden = np.array([metric.is_latency and outcome.backlog.is_growing for outcome in outcomes])
            values: FloatArray = np.array([outcome.values[metric.name] for outcome in outcomes], np.float64)
            places = np.array(xs) if all(isinstance(x, int | float) for x in xs) else np.arange(len(xs))
            style = {**_style(index), "marker": _MARKERS[index % len(_MARKERS)]}
            axes.plot(places, np.where(hidden, np.nan, values), label=candidate.name, **style)
            edge = [0.97 - 0.05 * index] * int(hidden.sum())
            note = f"{candidate.name}: unstable"
            if hidden.any():
                axes.plot(
                    places[hidden], edge, "x", color=f"C{index}", transform=axes.get_xaxis_transform(), label=note
                )
            if places.dtype.kind == "i" and not isinstance(xs[0], int | float):
                axes.set_xticks(places, xs)
        axes.set_ylim(bottom=0)
        axes.set_xlabel(label)
        axes.set_ylabel(_axis(metric, metric.name))
        axes.grid(alpha=0.3)
        axes.legend()

    return _picture(draw)


def _axis(metric: Metric, text: str) -> str:
    return f"{text}, {metric.unit}" if metric.unit else text
