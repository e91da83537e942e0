"""Whether a verdict depends on the model of step times: each coefficient smaller by a fifth, and larger by a quarter."""

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
"""A small and a large step of decodes, a first and a late piece of a prompt."""


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

    Coefficients are the numbers in a model that is an attrs class, those of its parts included; a mapping of numbers, such as the
    times of buckets, is one coefficient. Of any other model device and host times are scaled as wholes. Left out is what changes
    none of a few steps by 1 %.

    Args:
        step_times: The model.
    """
    found: list[tuple[str, StepTimes]] = []
    for factor in FACTORS:
        scaled = list(_scaled(step_times, factor))
        if not scaled:
            scaled = [(side, _Scaled(inner=step_times, **{side: factor})) for side in ("device", "host")]
        found += [(f"{name} × {factor:g}", model) for name, model in scaled if _differs(step_times, model)]
    return found


def _scaled(part: Any, factor: float, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield copies of an attrs instance, each with another coefficient in it scaled."""
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
    """Return whether a step takes another time; true for models of static shapes, which know no steps without buckets."""
    try:
        times_s = [
            (one.device_s(shape) + one.host_s(shape), two.device_s(shape) + two.host_s(shape)) for shape in _STEPS
        ]
    except ValueError:
        return True
    return any(abs(after_s - before_s) >= _LEAST_CHANGE * before_s for before_s, after_s in times_s)
