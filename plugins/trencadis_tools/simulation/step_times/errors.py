"""How far a model of step times is from measured steps: by kind of step, and over the run."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from trencadis_tools.simulation.step_shape import StepTimes
from trencadis_tools.simulation.step_times.records import KINDS, StepRecord, kind_of

__all__ = ["KindErrors", "step_time_errors"]


@attrs.frozen(kw_only=True)
class KindErrors:
    """Errors of one kind of step, as parts of the measured time: 0.02 is 2 %.

    Attributes:
        num_steps: Number of steps of the kind.
        measured_s: Wall time of all, idle time left out, seconds.
        device_mape: Mean absolute error of a step's device time.
        device_median: Median absolute error of it.
        device_sum: Signed error of the sum of device times: what queues see; above 0: predicted too long.
        step_mape: Mean absolute error of a step's device and host time together.
        step_sum: Signed error of the sum of both.
    """

    num_steps: int
    measured_s: float
    device_mape: float
    device_median: float
    device_sum: float
    step_mape: float
    step_sum: float


def step_time_errors(times: StepTimes, steps: Sequence[StepRecord]) -> dict[str, KindErrors]:
    """Return errors by kind of step, kinds without a step left out, and of ``all``. Pure.

    Raises:
        ValueError: There is no step, or the model knows no time for one.
    """
    if not steps:
        raise ValueError("there are no steps to compare with")
    by_kind = {kind: [step for step in steps if kind_of(step.shape) == kind] for kind in KINDS}
    return {kind: _errors(times, some) for kind, some in (*by_kind.items(), ("all", list(steps))) if some}


def _errors(times: StepTimes, steps: Sequence[StepRecord]) -> KindErrors:
    device = np.array([(times.device_s(step.shape), step.busy_s) for step in steps])
    wall = np.array([(_wall_s(times, step), step.wall_s) for step in steps])
    relative = np.abs(device[:, 0] - device[:, 1]) / np.maximum(device[:, 1], 1e-9)
    return KindErrors(
        num_steps=len(steps),
        measured_s=float(wall[:, 1].sum()),
        device_mape=float(relative.mean()),
        device_median=float(np.median(relative)),
        device_sum=_sum_error(device),
        step_mape=float((np.abs(wall[:, 0] - wall[:, 1]) / np.maximum(wall[:, 1], 1e-9)).mean()),
        step_sum=_sum_error(wall),
    )


def _wall_s(times: StepTimes, step: StepRecord) -> float:
    """Return the predicted time of a step on device and host together, with the measured one of drafting, seconds. Pure."""
    device_s, host_s = times.device_s(step.shape), times.host_s(step.shape)
    return max(device_s, host_s) if step.overlaps else device_s + host_s + step.draft_s


def _sum_error(pairs: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> float:
    expected, measured = pairs.sum(0)
    return float(expected / measured - 1) if measured else 0.0
