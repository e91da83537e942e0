"""A workload as bucketing sees it: which shapes, how often. From a trace by simulation, or from recorded shapes.

Recorded shapes are CSV with the columns ``phase`` (``prefill`` or ``decode``), ``batch_size``, ``query_len``,
``num_blocks``, ``count`` and, if known, ``num_tokens``: the new tokens of all these passes together, padding left out.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path

import attrs

from trencadis.errors import ConfigError
from trencadis.records import BucketLimits, Phase, Shape
from trencadis_gallery.bucketing.workloads.cost import DeviceCost
from trencadis_gallery.bucketing.workloads.formats import csv_rows
from trencadis_gallery.bucketing.workloads.steps import simulate_steps
from trencadis_gallery.bucketing.workloads.trace import Arrival, parse_trace, read_text

__all__ = ["Passes", "Source", "Workload", "read_source", "write_shapes"]

_COLUMNS = ("phase", "batch_size", "query_len", "num_blocks", "count", "num_tokens")


@attrs.frozen
class Passes:
    """All passes of one shape.

    Attributes:
        shape: Before padding.
        count: How often it ran, at least 1.
        num_tokens: New tokens of all of them together; less than positions where a batch had shorter queries too.
    """

    shape: Shape
    count: int
    num_tokens: int


@attrs.frozen
class Workload:
    """Every shape that ran, prefill before decode, ascending."""

    passes: tuple[Passes, ...]

    def of_phase(self, phase: Phase) -> tuple[Passes, ...]:
        """Return the passes of one phase. Pure."""
        return tuple(item for item in self.passes if item.shape.phase is phase)


@attrs.frozen
class Source:
    """Contents of a workload file: arrivals, from which limits make shapes, or shapes themselves.

    Attributes:
        name: Name of the file.
        arrivals: Arrivals of a trace; empty for recorded shapes.
        recorded: Recorded shapes; empty for a trace.
    """

    name: str
    arrivals: tuple[Arrival, ...] = ()
    recorded: tuple[Passes, ...] = ()

    def workload(self, limits: BucketLimits, cost: DeviceCost) -> Workload:
        """Return the shapes that an engine of these limits runs. Pure.

        Recorded shapes come back as they are, whatever the limits.
        """
        if self.recorded:
            return Workload(self.recorded)
        counts = simulate_steps(self.arrivals, limits, cost)
        return Workload(_sorted(Passes(shape, count, tokens) for shape, (count, tokens) in counts.items()))


def read_source(file: Path) -> Source:
    """Return what a trace file or a file of recorded shapes holds.

    Raises:
        ConfigError: It cannot be read, or a line is neither.
    """
    text = read_text(file)
    if text.lstrip().startswith("phase,"):
        return Source(file.name, recorded=_sorted(_shapes(text, file.name)))
    return Source(file.name, arrivals=parse_trace(text, file.name))


def write_shapes(file: Path, workload: Workload) -> None:
    """Write recorded shapes, so that tables can be fitted again without simulating.

    Raises:
        ConfigError: The file cannot be written.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for item in workload.passes:
        shape = item.shape
        sizes = (shape.batch_size, shape.query_len, shape.num_blocks)
        writer.writerow((shape.phase.value, *sizes, item.count, item.num_tokens))
    try:
        file.write_text(out.getvalue())
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error}.", hint="Give another path.") from error


def _sorted(passes: Iterator[Passes]) -> tuple[Passes, ...]:
    return tuple(sorted(passes, key=lambda item: (item.shape.phase is Phase.DECODE, item.shape)))


def _shapes(text: str, name: str) -> Iterator[Passes]:
    """Yield recorded shapes, each once.

    Raises:
        ConfigError: A line is no shape, or there is none.
    """
    found: dict[Shape, tuple[int, int]] = {}
    reader = csv.DictReader(text.splitlines())
    for row in csv_rows(reader, name):
        try:
            batch_size, query_len, num_blocks, count = (int(row[column]) for column in _COLUMNS[1:5])
            shape = Shape(batch_size, query_len, num_blocks, Phase(row["phase"]))
            num_tokens = int(row["num_tokens"]) if row.get("num_tokens") else shape.num_tokens * count
            if min(batch_size, query_len, count) < 1 or num_blocks < 0:
                raise ValueError("sizes and counts are 1 or more, blocks 0 or more")
        except (KeyError, TypeError, ValueError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise ConfigError(
                f"{name}: line {reader.line_num} is no recorded shape: {what}.",
                hint=f"The columns are {', '.join(_COLUMNS)}.",
            ) from error
        before = found.get(shape, (0, 0))
        found[shape] = (before[0] + count, before[1] + num_tokens)
    if not found:
        raise ConfigError(f"{name}: holds no shape.", hint="Record at least one pass.")
    return (Passes(shape, count, num_tokens) for shape, (count, num_tokens) in found.items())
