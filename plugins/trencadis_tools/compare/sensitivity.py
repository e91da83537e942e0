"""Sensitivity of verdicts to the model of step times: each coefficient times 0.8, and times 1.25."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from trencadis_tools.simulation import StepShape, StepTimes

__all__ = ["FACTORS", "Flip", "scaled_step_times"]

FACTORS = (0.8, 1.25)

_LEAST_CHANGE = 0.01
_STEPS = (
    StepShape(num_decodes=1, num_decode_tokens=1, num_decode_context=100),
    StepShape(num_decodes=64, num_decode_tokens=64, num_decode_context=128_000),
    StepShape(num_prefills=1, num_prefill_tokens=512, num_prefill_context=512, prefill_products=131_328.0, num_new=1),
    StepShape(
        num_prefills=1, num_prefill_tokens=2048, num_prefill_context=32_768, prefill_products=65_012_736.0, num_new=1
    ),
)
"""Sample steps: a small and a large decode step, a first and a late prefill chunk."""


@attrs.frozen(kw_only=True)
class Flip:
    """A verdict whose sign depends on a coefficient.

    Attributes:
        metric: Name of the metric.
        other: Name of the configuration compared with the baseline.
        scaled: Scaled coefficient, such as ``base_s × 0.8``.
        difference: Other minus baseline with the scaled coefficient.
    """

    metric: str
    other: str
    scaled: str
    difference: float


@attrs.frozen(kw_only=True)
class _Scaled:
    """Step times with all device or all host times scaled, for models without visible coefficients."""

    inner: StepTimes
    device: float = 1.0
    host: float = 1.0

    def device_s(self, shape: StepShape) -> float:
        return self.device * self.inner.device_s(shape)

    def host_s(self, shape: StepShape) -> float:
        return self.host * self.inner.host_s(shape)


def scaled_step_times(step_times: StepTimes) -> list[tuple[str, StepTimes]]:
    """Return a model for each coefficient and factor, with the name of the scaled coefficient. Pure.

    Coefficients are the numbers in a model that is an attrs class, including those of nested classes; a mapping of numbers, such as the
    times of buckets, is one coefficient. Any other model has two: all device times and all host times. Coefficients that change
    none of a few sample steps by 1 % are left out.

    Args:
        step_times: Model of step times.
    """
    found: list[tuple[str, StepTimes]] = []
    for factor in FACTORS:
        scaled = list(_scaled(step_times, factor))
        if not scaled:
            scaled = [(side, _Scaled(inner=step_times, **{side: factor})) for side in ("device", "host")]
        found += [(f"{name} × {factor:g}", model) for name, model in scaled if _differs(step_times, model)]
    return found


def _scaled(part: Any, factor: float, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield copies of an attrs instance, each with a different coefficient scaled."""
    for field in attrs.fields(type(part)) if attrs.has(type(part)) else ():
        value, name = getattr(part, field.name), f"{prefix}{field.name}"
        if not field.init:
            continue
        if isinstance(value, float) and value:
            yield name, attrs.evolve(part, **{field.name: value * factor})
        elif isinstance(value, Mapping) and value and all(isinstance(item, float) for item in value.values()):
            changed = {key: item * factor for key, item in value.items()}
            yield name, attrs.evolve(part, **{field.name: changed})
        elif attrs.has(type(value)):
            for inner_name, inner in _scaled(value, factor, f"{name}."):
                yield inner_name, attrs.evolve(part, **{field.name: inner})


def _differs(one: StepTimes, two: StepTimes) -> bool:
    """Return whether sample steps take different times; true for models of static shapes, which have no steps without buckets."""
    try:
        times_s = [
            (one.device_s(shape) + one.host_s(shape), two.device_s(shape) + two.host_s(shape)) for shape in _STEPS
        ]
    except ValueError:
        return True
    return any(abs(after_s - before_s) >= _LEAST_CHANGE * before_s for before_s, after_s in times_s)
