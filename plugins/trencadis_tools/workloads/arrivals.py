"""Arrival times: drawn, or recorded and stretched.

Times are drawn in two steps. Gaps of mean 1 give operational times: S is the expected number of requests so
far. The pattern converts these to seconds: t is the time at which the integral of the rate reaches S. With exponential gaps
this is a Poisson process of exactly that rate. A different rate moves requests without new draws, unlike thinning.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import attrs
import numpy as np
from attrs.validators import and_, ge, gt, le

from trencadis.errors import ConfigValueError
from trencadis.records import FloatArray
from trencadis_tools.workloads.draws import Stream, exponentials, gammas

__all__ = ["Arrivals", "arrival_times", "stretch"]

_STEPS = 64
"""Bisection steps that find a time in a diurnal pattern, more than the bits of a float64."""


@attrs.frozen(kw_only=True)
class Arrivals:
    """Table ``[arrivals]`` of a workload file. With sessions, these are the arrivals of sessions.

    Attributes:
        times: recorded: times of the trace, stretched to the rate; drawn; auto: recorded if there is a trace with times.
        rate: Mean rate, requests per second; 0: as recorded; infinity: all at once.
        cv: Coefficient of variation of drawn gaps: 1: Poisson; 0: evenly spaced; above 1: Gamma with clusters.
        pattern: Change of the rate of drawn times. constant; diurnal: sine; ramp: linear, then constant; bursts: two alternating
            rates.
        amplitude: Amplitude of a diurnal pattern, 0 to 1: the rate goes from ``(1 - amplitude)`` to ``(1 + amplitude)`` times
            ``rate``.
        period_s: Period of a diurnal pattern, seconds; it begins at the lowest rate.
        end_rate: Final rate of a ramp, requests per second; it begins with ``rate``.
        ramp_s: Duration of a ramp, seconds.
        burst_ratio: Rate in a burst divided by the rate between bursts; the mean over time is ``rate``.
        burst_s: Mean duration of a burst, seconds; exponential, so that rates follow a Markov chain.
        calm_s: Mean duration between two bursts, seconds; exponential.
    """

    times: Literal["auto", "recorded", "drawn"] = "auto"
    rate: float = attrs.field(default=0.0, validator=ge(0))
    cv: float = attrs.field(default=1.0, validator=ge(0))
    pattern: Literal["constant", "diurnal", "ramp", "bursts"] = "constant"
    amplitude: float = attrs.field(default=0.5, validator=and_(ge(0), le(1)))
    period_s: float = attrs.field(default=86_400.0, validator=gt(0))
    end_rate: float = attrs.field(default=0.0, validator=ge(0))
    ramp_s: float = attrs.field(default=600.0, validator=gt(0))
    burst_ratio: float = attrs.field(default=10.0, validator=ge(1))
    burst_s: float = attrs.field(default=10.0, validator=gt(0))
    calm_s: float = attrs.field(default=90.0, validator=gt(0))


def stretch(times: Sequence[float], rate: float) -> float:
    """Return the factor that stretches ascending recorded times to a mean rate; 1 for rate 0 (as recorded). Pure."""
    span_s = times[-1] - times[0]
    return (len(times) - 1) / (rate * span_s) if rate and span_s else 1.0


def arrival_times(arrivals: Arrivals, seed: int, num: int) -> FloatArray:
    """Return ``num`` ascending times, seconds. Pure.

    Raises:
        ConfigValueError: There is no rate.
    """
    if arrivals.rate == math.inf:
        return np.zeros(num)
    if not arrivals.rate:
        raise ConfigValueError(
            "[arrivals] rate = 0: times that are drawn need a rate.",
            hint='Say how many a second, or rate = inf for "all at once".',
        )
    moments = np.cumsum(_gaps(arrivals.cv, seed, num))
    if arrivals.pattern == "diurnal":
        return _diurnal(arrivals, moments)
    if arrivals.pattern == "ramp":
        return _ramp(arrivals, moments)
    if arrivals.pattern == "bursts":
        return _bursts(arrivals, seed, moments)
    return moments / arrivals.rate


def _gaps(cv: float, seed: int, num: int) -> FloatArray:
    indices = np.arange(num)
    if not cv:
        return np.ones(num)
    if cv == 1:
        return exponentials(seed, Stream.GAPS, indices)
    return gammas(seed, Stream.GAPS, indices, shape=1 / cv**2)


def _diurnal(arrivals: Arrivals, moments: FloatArray) -> FloatArray:
    """Invert ``rate * (t - A P / 2 pi * sin(2 pi t / P))``, the integral of ``rate * (1 - A cos(2 pi t / P))``."""
    swing_s = arrivals.amplitude * arrivals.period_s / (2 * math.pi)
    low, high = moments / arrivals.rate - swing_s, moments / arrivals.rate + swing_s
    for _ in range(_STEPS):
        middle = (low + high) / 2
        reached = middle - swing_s * np.sin(2 * math.pi * middle / arrivals.period_s) >= moments / arrivals.rate
        low, high = np.where(reached, low, middle), np.where(reached, middle, high)
    return np.maximum.accumulate(np.maximum(high, 0.0))


def _ramp(arrivals: Arrivals, moments: FloatArray) -> FloatArray:
    """Invert ``r0 t + (r1 - r0) t**2 / 2T`` up to T, and the line of slope r1 after it."""
    first, last, ramp_s = arrivals.rate, arrivals.end_rate, arrivals.ramp_s
    if not last:
        raise ConfigValueError("[arrivals] end_rate = 0: a ramp ends with a rate.", hint="Say how many a second.")
    at_end = (first + last) / 2 * ramp_s
    slope = (last - first) / ramp_s
    within = np.minimum(moments, at_end)
    # Numerically stable form of the root, also valid for slope 0.
    on_ramp: FloatArray = 2 * within / (first + np.sqrt(np.maximum(0.0, first**2 + 2 * slope * within)))
    after_ramp: FloatArray = np.maximum(0.0, moments - at_end) / last
    return on_ramp + after_ramp


def _bursts(arrivals: Arrivals, seed: int, moments: FloatArray) -> FloatArray:
    """Invert the integral of a rate that a Markov chain of two states switches; calm first."""
    calm_s, burst_s = arrivals.calm_s, arrivals.burst_s
    calm_rate = arrivals.rate * (calm_s + burst_s) / (calm_s + arrivals.burst_ratio * burst_s)
    num = 2 * (2 + int(moments[-1] / (arrivals.rate * (calm_s + burst_s))))
    while True:
        stays = exponentials(seed, Stream.STATES, np.arange(num)) * np.tile([calm_s, burst_s], num // 2)
        reached = np.cumsum(stays * np.tile([calm_rate, calm_rate * arrivals.burst_ratio], num // 2))
        if reached[-1] >= moments[-1]:
            times: FloatArray = np.interp(moments, np.append(0.0, reached), np.append(0.0, np.cumsum(stays)))
            return times
        num *= 2
