"""Whether a verdict depends on the model of step times: each coefficient smaller by a fifth, and larger by a quarter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from trencadis_tools.simulation import StepShape, StepTimes

__all__ = ["FACTORS", "Flip", "scaled_step_times"]

FACTORS = (0.8, 1.25)


@attrs.frozen(kw_only=True)
class Flip:
    """A verdict whose sign depends on a coefficient.

    Attributes:
        metric: Name.
        other: Name of the configuration beside the baseline.
        scaled: Such as ``base_s × 0.8``.
        difference: Other minus baseline with it.
    """

    metric: str
    other: str
    scaled: str
    difference: float


@attrs.frozen(kw_only=True)
class _Scaled:
    """Step times with all device or all host times scaled, for models that do not show coefficients."""

    inner: StepTimes
    device: float = 1.0
    host: float = 1.0

    def device_s(self, shape: StepShape) -> float:
        return self.device * self.inner.device_s(shape)

    def host_s(self, shape: StepShape) -> float:
        return self.host * self.inner.host_s(shape)


def scaled_step_times(step_times: StepTimes) -> list[tuple[str, StepTimes]]:
    """Return a model for each coefficient and factor, with what was scaled. Pure.

    Coefficients are the numbers in a model that is an attrs class, those of its parts included; of any other model device and host
    times are scaled as wholes. What is 0 stays 0 and is left out.

    Args:
        step_times: The model.
    """
    found: list[tuple[str, StepTimes]] = []
    for factor in FACTORS:
        scaled = list(_scaled(step_times, factor))
        if not scaled:
            scaled = [(side, _Scaled(inner=step_times, **{side: factor})) for side in ("device", "host")]
        found += [(f"{name} × {factor:g}", model) for name, model in scaled]
    return found


def _scaled(part: Any, factor: float, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield copies of an attrs instance, each with another number in it scaled."""
    for field in attrs.fields(type(part)) if attrs.has(type(part)) else ():
        value, name = getattr(part, field.name), f"{prefix}{field.name}"
        if isinstance(value, float) and value and field.init:
            yield name, attrs.evolve(part, **{field.name: value * factor})
        elif attrs.has(type(value)) and field.init:
            for inner_name, inner in _scaled(value, factor, f"{name}."):
                yield inner_name, attrs.evolve(part, **{field.name: inner})
