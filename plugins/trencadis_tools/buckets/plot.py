"""Plot of bucket tables over observed shapes. Requires matplotlib (extra ``plot``)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trencadis.errors import ConfigError
from trencadis.records import Phase, Shape
from trencadis_gallery.bucketing.workloads.workload import Workload
from trencadis_tools.buckets.report import TableReport

__all__ = ["plot_tables"]

_MARKERS = "s^oDvP*X"


def plot_tables(file: Path, reports: Mapping[str, TableReport], workload: Workload | None = None) -> None:
    """Draw buckets over observed shapes: prefill as query length and context, decode as batch size and blocks.

    Args:
        file: Output file; its suffix chooses the format, such as .png or .svg.
        reports: Reports by name of the strategy.
        workload: Observed shapes; shapes that ran more often are darker. None: only buckets are drawn.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            f"{file}: a picture needs matplotlib, which is not installed.",
            hint='Run pip install "trencadis[plot]", or leave out --plot.',
        ) from None
    figure = Figure(figsize=(12, 5), layout="constrained")
    prefill, decode = figure.subplots(1, 2)
    _draw(prefill, reports, workload, Phase.PREFILL)
    _draw(decode, reports, workload, Phase.DECODE)
    try:
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be written: {error}.", hint="Give a path that ends in .png.") from error


def _draw(axes: Any, reports: Mapping[str, TableReport], workload: Workload | None, phase: Phase) -> None:
    if workload is not None:
        passes = workload.of_phase(phase)
        points = [_point(item.shape) for item in passes]
        shades = [math.log1p(item.count) for item in passes]
        axes.scatter(*_columns(points), c=shades, cmap="Greys", s=8, vmin=-1, label="ran", rasterized=True)
    for index, (name, report) in enumerate(reports.items()):
        buckets = report.of_phase(phase)
        label = f"{name} ({len(buckets)})"
        axes.scatter(*_columns([_point(bucket) for bucket in buckets]), marker=_MARKERS[index % 8], s=24, label=label)
    axes.set_title(phase.value)
    axes.set_xlabel("query length, tokens" if phase is Phase.PREFILL else "batch size, sequences")
    axes.set_ylabel("context, blocks" if phase is Phase.PREFILL else "KV blocks")
    axes.set_xscale("log", base=2)
    if phase is Phase.PREFILL:
        # A logarithmic axis cannot show a pass without context (0).
        axes.set_yscale("symlog", base=2, linthresh=1)
        axes.set_ylim(bottom=-0.5)
    else:
        axes.set_yscale("log", base=2)
    axes.legend()


def _point(shape: Shape) -> tuple[int, int]:
    return (shape.query_len if shape.phase is Phase.PREFILL else shape.batch_size), shape.num_blocks


def _columns(points: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [x for x, _ in points], [y for _, y in points]
