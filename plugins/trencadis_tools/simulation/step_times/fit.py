"""Step times from measured steps: non-negative least squares, made robust against steps that something else slowed down.

records ▶ without warm-up and compilations ▶ device: line or table of buckets ▶ host: line ▶ errors on other records

A machine that lends its cores to others makes some steps longer, never shorter, by up to several times. Residuals are therefore weighted by
Tukey's biweight: steps within the spread of the others count fully, those beyond 4.685 times it not at all. The spread is that of the
median residual, which half of the steps can exceed by any amount without moving it. Residuals of device times are relative to the
expected time; those of host times are not, for the device may wait for nothing, or less: a commit may be late when the next step runs.

Source: Lawson and Hanson, Solving Least Squares Problems, 1974 (NNLS); Holland and Welsch, Robust regression using iteratively reweighted
least-squares, 1977 (biweight, 4.685: 95 % as efficient as least squares with normal residuals); Belsley, Kuh and Welsch, Regression
Diagnostics, 1980 (condition index).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import numpy as np

from trencadis.errors import ConfigError
from trencadis.records import Bucket, FloatArray, Phase, StepShape
from trencadis_tools.lab import library
from trencadis_tools.simulation.step_times.buckets import BucketStepTimes, bucket_sizes
from trencadis_tools.simulation.step_times.linear import LinearStepTimes
from trencadis_tools.simulation.step_times.records import StepRecord

__all__ = ["DEVICE_SIZES", "HOST_SIZES", "Coefficient", "Fit", "fit_step_times", "nonnegative_solution"]

DEVICE_SIZES: Final[dict[str, Callable[[StepShape], float]]] = {
    "base_s": lambda _: 1.0,
    "token_s": lambda shape: shape.num_tokens,
    "context_s": lambda shape: shape.num_context,
    "product_s": lambda shape: shape.prefill_products,
    "row_s": lambda shape: shape.num_rows,
}
HOST_SIZES: Final[dict[str, Callable[[StepShape], float]]] = {
    "host_base_s": lambda _: 1.0,
    "host_row_s": lambda shape: shape.num_rows,
    "host_new_s": lambda shape: shape.num_new,
}

_BIWEIGHT: Final = 4.685
_STEPS_PER_COEFFICIENT: Final = 10
_MAX_CONDITION: Final = 1000.0
_NUM_ROUNDS: Final = 50


@attrs.frozen(kw_only=True)
class Coefficient:
    """One fitted number.

    Attributes:
        value: Seconds for one of its sizes.
        error: Standard error, seconds; 0 where it came out as 0.
    """

    value: float
    error: float


@attrs.frozen(kw_only=True)
class Fit:
    """Step times with what they were fitted from.

    Attributes:
        times: The model.
        coefficients: Coefficients of the line, by name.
        num_steps: Used.
        num_outliers: Number of steps that lost their weight in the device's fit.
    """

    times: LinearStepTimes | BucketStepTimes
    coefficients: dict[str, Coefficient]
    num_steps: int
    num_outliers: int


def fit_step_times(
    steps: Sequence[StepRecord],
    *,
    leave_out: Sequence[str] = (),
    by_bucket: bool = False,
    robust: bool = True,
    source: str = "the records",
) -> Fit:
    """Return the step times that fit best. Deterministic.

    Args:
        steps: Measured, without warm-up.
        leave_out: Names of coefficients that are to be 0.
        by_bucket: Give each bucket its time instead of a line for the device.
        robust: Take weight from outliers, for typical times; else every step counts, and the sum over a run is closest. Buckets have
            medians either way.
        source: Names the records in errors.

    Raises:
        ConfigError: SciPy is missing, there are too few steps, or some sizes cannot be told apart; names them.
    """
    host = _line(steps, [step.host_s for step in steps], _chosen(HOST_SIZES, leave_out), source, robust, relative=False)
    if by_bucket:
        times_s, lines, is_outlier = _by_bucket(steps, source)
        values: dict[str, Any] = {name: one.value for name, one in host.coefficients.items()}
        times: LinearStepTimes | BucketStepTimes = BucketStepTimes(times_s=times_s, lines=lines, **values)
        return Fit(
            times=times,
            coefficients=host.coefficients,
            num_steps=len(steps),
            num_outliers=int(is_outlier.sum()),
        )
    device = _line(
        steps, [step.busy_s for step in steps], _chosen(DEVICE_SIZES, leave_out), source, robust, relative=True
    )
    coefficients = device.coefficients | host.coefficients
    named: dict[str, Any] = dict.fromkeys(DEVICE_SIZES, 0.0) | {name: one.value for name, one in coefficients.items()}
    return Fit(
        times=LinearStepTimes(**named),
        coefficients=coefficients,
        num_steps=len(steps),
        num_outliers=device.num_outliers,
    )


@attrs.frozen(kw_only=True)
class _Line:
    coefficients: dict[str, Coefficient]
    num_outliers: int


def _chosen(
    sizes: dict[str, Callable[[StepShape], float]], leave_out: Sequence[str]
) -> dict[str, Callable[[StepShape], float]]:
    unknown = set(leave_out) - set(DEVICE_SIZES) - set(HOST_SIZES)
    if unknown:
        raise ConfigError(
            f"there is no coefficient {', '.join(sorted(unknown))} to leave out.",
            hint=f"There are {', '.join((*DEVICE_SIZES, *HOST_SIZES))}.",
        )
    return {name: size for name, size in sizes.items() if name not in leave_out}


def _line(
    steps: Sequence[StepRecord],
    times_s: Sequence[float],
    sizes: dict[str, Callable[[StepShape], float]],
    source: str,
    robust: bool,
    *,
    relative: bool,
) -> _Line:
    """Return the line through measured times over some sizes."""
    names = list(sizes)
    if len(steps) < _STEPS_PER_COEFFICIENT * len(names):
        raise ConfigError(
            f"{source}: {len(steps)} steps are too few to fit {len(names)} coefficients ({', '.join(names)}).",
            hint=f"Record at least {_STEPS_PER_COEFFICIENT * len(names)} steps after the warm-up, better some thousand.",
        )
    if not names:
        return _Line(coefficients={}, num_outliers=0)
    columns: FloatArray = np.array([[size(step.shape) for size in sizes.values()] for step in steps], np.float64)
    _check_columns(columns, names, source)
    values, errors, weights = _weighted(columns, np.array(times_s, np.float64), robust, relative)
    coefficients = {
        name: Coefficient(value=float(value), error=float(error))
        for name, value, error in zip(names, values, errors, strict=True)
    }
    return _Line(coefficients=coefficients, num_outliers=int((weights == 0).sum()))


def _check_columns(columns: FloatArray, names: Sequence[str], source: str) -> None:
    """Raise if some sizes are always 0, or in proportion to each other.

    Raises:
        ConfigError: They are; names them.
    """
    hint = "Record prompts and outputs of several lengths at several rates, or leave one out (--leave-out)."
    lengths = np.sqrt((columns**2).sum(0))
    empty = [name for name, length in zip(names, lengths, strict=True) if not length]
    if empty:
        raise ConfigError(f"{source}: no step has a size for {', '.join(empty)}.", hint=hint)
    _, singular, directions = np.linalg.svd(columns / lengths, full_matrices=False)
    if singular[-1] * _MAX_CONDITION >= singular[0]:
        return
    together = [name for name, part in zip(names, directions[-1], strict=True) if abs(part) > 0.1]
    raise ConfigError(f"{source}: the steps do not tell {' and '.join(together)} apart.", hint=hint)


def _weighted(
    columns: FloatArray, times_s: FloatArray, robust: bool, relative: bool
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return coefficients, their standard errors, and the last weights of the steps; see the head of this module.

    Robust: biweighted squares of residuals. Else, if they are relative, squares of residuals by the expected time: its solution has the
    sum of the measured times, for the condition of non-negative least squares, ``values · gradient = 0``, is then that of equal sums.
    """
    scale = np.abs(columns).max(0)
    unit = columns / scale
    floor_s = 1e-3 * max(float(np.median(times_s)), 1e-9)
    noise = np.maximum(times_s, floor_s) if relative else np.ones(len(times_s))
    weights = np.ones(len(times_s))
    values = np.zeros(columns.shape[1])
    for _ in range(_NUM_ROUNDS):
        factors = np.sqrt(weights) / noise if robust else noise**-0.5
        before, values = values, nonnegative_solution(unit * factors[:, None], times_s * factors)
        expected_s = unit @ values
        if relative:
            noise = np.maximum(expected_s, floor_s)
        residuals = (times_s - expected_s) / noise
        if robust:
            spread = 1.4826 * float(np.median(np.abs(residuals)))
            weights = np.clip(1 - (residuals / (_BIWEIGHT * max(spread, 1e-9))) ** 2, 0, None) ** 2
        else:
            spread = float(residuals.std())
        if np.abs(values - before).max() <= 1e-9 * np.abs(values).max():
            break
    errors = np.zeros(len(values))
    errors[values > 0] = _errors(unit[:, values > 0], factors**2, spread * noise)
    return values / scale, errors / scale, weights


def _errors(unit: FloatArray, weights: FloatArray, noise_s: FloatArray) -> FloatArray:
    """Return standard errors of least squares with these weights, if residuals are as large as ``noise_s``. Pure."""
    inverse = np.linalg.pinv(unit.T @ (unit * weights[:, None]))
    spread = unit * (weights * noise_s)[:, None]
    return np.asarray(np.sqrt(np.diag(inverse @ (spread.T @ spread) @ inverse)), np.float64)


def nonnegative_solution(columns: FloatArray, times_s: FloatArray) -> FloatArray:
    """Return the coefficients of 0 or more with the least squares of ``columns @ coefficients - times_s``, float64 ``[num_columns]``. Pure.

    Raises:
        ConfigError: SciPy is missing.
    """
    nnls = library("scipy.optimize", purpose="a fit of step times").nnls
    # The triangular factor has the same solution, at a size that no longer grows with the number of steps.
    triangle: FloatArray = np.asarray(np.linalg.qr(np.column_stack([columns, times_s]), mode="r"))
    return np.asarray(nnls(triangle[:, :-1], triangle[:, -1])[0], np.float64)


def _by_bucket(
    steps: Sequence[StepRecord], source: str
) -> tuple[dict[Bucket, float], dict[Phase, tuple[float, float, float]], FloatArray]:
    """Return a median time for each bucket, the lines between them, and which steps are far from what they say.

    Buckets that were alone in a step come first; of one that never was, the time of the others is taken off.
    """
    if not any(step.shape.buckets for step in steps):
        raise ConfigError(
            f"{source}: no step has a bucket, so that none can have a time of its own.",
            hint="Leave --by-bucket out: only devices with static shapes have buckets.",
        )
    times_s: dict[Bucket, float] = {}
    while True:
        found: dict[Bucket, list[float]] = {}
        for step in steps:
            unknown = {bucket for bucket in step.shape.buckets if bucket not in times_s}
            if len(unknown) == 1:
                (bucket,) = unknown
                rest_s = step.busy_s - sum(times_s.get(other, 0.0) for other in step.shape.buckets)
                found.setdefault(bucket, []).append(rest_s / step.shape.buckets.count(bucket))
        medians = {bucket: float(np.median(spent)) for bucket, spent in found.items()}
        new = {bucket: median_s for bucket, median_s in medians.items() if median_s > 0}
        if not new:
            break
        times_s |= new
    known = [step for step in steps if all(bucket in times_s for bucket in step.shape.buckets)]
    sums = np.array([sum(times_s[bucket] for bucket in step.shape.buckets) for step in known])
    residuals = np.array([step.busy_s for step in known]) / np.maximum(sums, 1e-12) - 1
    spread = 1.4826 * float(np.median(np.abs(residuals)))
    lines = {phase: _bucket_line(times_s, phase) for phase in Phase if any(one.phase is phase for one in times_s)}
    return times_s, lines, np.abs(residuals) > _BIWEIGHT * max(spread, 1e-9)


def _bucket_line(times_s: dict[Bucket, float], phase: Phase) -> tuple[float, float, float]:
    measured = [(bucket_sizes(bucket), time_s) for bucket, time_s in times_s.items() if bucket.phase is phase]
    columns = np.array([(1.0, *sizes) for sizes, _ in measured])
    times = np.array([time_s for _, time_s in measured])
    scale = np.maximum(columns.max(0), 1.0)
    base_s, position_s, block_s = nonnegative_solution(columns / scale / times[:, None], np.ones(len(times))) / scale
    return float(base_s), float(position_s), float(block_s)
