"""Fitted step times as JSON: written with what they were fitted from, and read again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from trencadis.errors import ConfigError
from trencadis.files import read_json
from trencadis.records import Phase
from trencadis_plugins.observer.recorder import bucket_fields
from trencadis_tools.simulation.step_times.buckets import BucketStepTimes
from trencadis_tools.simulation.step_times.linear import HostTimes, LinearStepTimes
from trencadis_tools.simulation.step_times.records import bucket_of

__all__ = ["read_step_times", "step_times_json"]

_FORMAT: Final = "trencadis step times 1"
_HOST: Final = tuple(field.name for field in attrs.fields(HostTimes))


def step_times_json(times: LinearStepTimes | BucketStepTimes, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model as it is written. Pure.

    Args:
        times: The model.
        facts: Further contents of the file: origin and errors of the step times.
    """
    if isinstance(times, LinearStepTimes):
        return {"format": _FORMAT, "kind": "linear", "coefficients": attrs.asdict(times), **facts}
    buckets = [[*bucket_fields(bucket), time_s] for bucket, time_s in times.times_s.items()]
    return {
        "format": _FORMAT,
        "kind": "buckets",
        "coefficients": {name: getattr(times, name) for name in _HOST},
        "buckets": buckets,
        "lines": {phase.value: list(line) for phase, line in times.lines.items()},
        **facts,
    }


def read_step_times(path: str | Path) -> LinearStepTimes | BucketStepTimes:
    """Return the model that a file holds.

    Raises:
        ConfigError: There is no such file, or it holds something else.
    """
    try:
        found = read_json(path)
        if found["format"] != _FORMAT:
            raise ValueError(f'"format" is {found["format"]!r}, not "{_FORMAT}"')
        if found["kind"] == "linear":
            return LinearStepTimes(**found["coefficients"])
        if found["kind"] != "buckets":
            raise ValueError(f'"kind" is {found["kind"]!r}, neither "linear" nor "buckets"')
        return BucketStepTimes(
            times_s={bucket_of(sizes): float(time_s) for *sizes, time_s in found["buckets"]},
            lines={Phase(phase): tuple(line) for phase, line in found["lines"].items()},
            **found["coefficients"],
        )
    except (AttributeError, OSError, OverflowError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} holds no step times: {type(error).__name__}: {error}.",
            hint="Write such a file with trencadis bench fit --records FILE --out FILE.",
        ) from error
