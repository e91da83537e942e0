"""Records are read as they were written, and refused by line where they were not."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from support.step_records import TRUE, shapes, steps_of, write_steps
from trencadis.records import Bucket, Phase, StepShape, UnifiedBucket
from trencadis_tools.simulation.step_times import LinearStepTimes, read_records, steady, step_time_errors
from trencadis_tools.simulation.step_times.records import kind_of


def test_steps_are_read_as_they_were_written(tmp_path):
    steps = steps_of(TRUE, shapes(20), noise=0.1)
    buckets = (Bucket(1, 64, 2), Bucket(4, 1, 9, Phase.DECODE), UnifiedBucket(8, 4, 2, False))
    steps[3] = attrs.evolve(steps[3], shape=attrs.evolve(steps[3].shape, buckets=buckets))
    records = read_records(write_steps(steps, tmp_path / "steps.jsonl"))
    assert list(records.steps) == steps
    assert records.measured["processor"] == "a processor"


def test_half_a_last_line_is_left_out(tmp_path):
    path = Path(write_steps(steps_of(TRUE, shapes(3)), tmp_path / "steps.jsonl"))
    path.write_text(path.read_text() + '{"step":')
    assert len(read_records(path).steps) == 3


def test_warm_up_and_compilations_are_left_out():
    steps = steps_of(TRUE, shapes(6))
    steps[4] = attrs.evolve(steps[4], num_compilations=1)
    assert steady(steps, num_warm_up=2) == [steps[2], steps[3], steps[5]]


def test_kinds_are_decodes_prefills_and_both():
    prefill = {"num_prefills": 1, "num_prefill_tokens": 9}
    assert kind_of(StepShape(num_decodes=1, num_decode_tokens=1)) == "decode"
    assert kind_of(StepShape(**prefill)) == "prefill"
    assert kind_of(StepShape(num_decodes=1, num_decode_tokens=1, **prefill)) == "mixed"


def test_errors_are_those_of_the_ratio_between_two_models():
    longer = attrs.evolve(
        TRUE, **{name: 1.1 * value for name, value in attrs.asdict(TRUE).items() if name != "overlap"}
    )
    errors = step_time_errors(longer, steps_of(TRUE, shapes(400)))
    assert set(errors) == {"decode", "prefill", "mixed", "all"}
    assert sum(one.num_steps for kind, one in errors.items() if kind != "all") == errors["all"].num_steps == 400
    for one in errors.values():
        assert (one.device_mape, one.device_median, one.device_sum) == pytest.approx((0.1, 0.1, 0.1))
        assert (one.step_mape, one.step_sum) == pytest.approx((0.1, 0.1))


def test_errors_of_opposite_sign_cancel_in_the_sum_alone():
    steps = steps_of(TRUE, shapes(2))
    shape, time_s = steps[0].shape, steps[0].device_s
    pair = [attrs.evolve(steps[0], shape=shape, device_s=part * time_s) for part in (0.8, 1.2)]
    errors = step_time_errors(TRUE, pair)["all"]
    assert errors.device_sum == pytest.approx(0.0, abs=1e-12)
    assert errors.device_mape == pytest.approx((0.2 / 0.8 + 0.2 / 1.2) / 2)


def test_no_steps_have_no_errors():
    with pytest.raises(ValueError, match="no steps"):
        step_time_errors(TRUE, [])


def test_of_steps_that_overlap_the_device_has_the_wall_time_and_the_host_hides():
    step = attrs.evolve(steps_of(TRUE, shapes(1))[0], device_s=2.0, wall_s=2.5, plan_s=0.25, commit_s=0.125)
    assert (step.busy_s, step.host_s) == (2.0, 0.5)
    overlapped = attrs.evolve(step, overlaps=True)
    assert (overlapped.busy_s, overlapped.host_s) == (2.5, 0.375)
    lines = LinearStepTimes(base_s=2.5, token_s=0.0, context_s=0.0, host_base_s=0.375)
    assert step_time_errors(lines, [overlapped])["all"].step_sum == 0.0
    assert step_time_errors(lines, [step])["all"].step_sum == pytest.approx(2.875 / 2.5 - 1)


def test_drafting_is_no_time_of_the_host_and_part_of_the_whole_step():
    step = attrs.evolve(steps_of(TRUE, shapes(1))[0], device_s=2.0, wall_s=3.0, plan_s=0.75, draft_s=0.5)
    assert step.host_s == 0.5
    errors = step_time_errors(TRUE, [step])["all"]
    expected_s = TRUE.device_s(step.shape) + TRUE.host_s(step.shape) + 0.5
    assert errors.step_sum == pytest.approx(expected_s / 3.0 - 1)
