"""Step times by name, and as files."""

from __future__ import annotations

import json

import pytest

from trencadis.records import Bucket, Phase, StepShape, UnifiedBucket
from trencadis_tools.simulation.step_times import (
    BucketStepTimes,
    LinearStepTimes,
    SheetStepTimes,
    load_step_times,
    read_model_sizes,
    step_times_json,
)

LINEAR = LinearStepTimes(
    base_s=1e-3, token_s=2e-5, context_s=0.0, product_s=1e-9, row_s=3e-6, host_base_s=4e-4, overlap=True
)
BUCKETS = BucketStepTimes(
    times_s={Bucket(1, 64, 2): 5e-3, Bucket(8, 1, 32, Phase.DECODE): 2e-3, UnifiedBucket(16, 4, 2, False): 1e-3},
    lines={Phase.PREFILL: (1e-3, 1e-5, 0.0), Phase.DECODE: (1e-3, 0.0, 1e-6)},
    host_row_s=1e-6,
)


@pytest.mark.parametrize("times", [LINEAR, BUCKETS], ids=["linear", "buckets"])
def test_what_was_written_is_read(times, tmp_path):
    path = tmp_path / "times.json"
    path.write_text(json.dumps(step_times_json(times, {"provenance": {"device": "a device"}})))
    assert load_step_times(path) == times


def test_names_are_of_a_sheet_and_a_model_with_ranks_and_bounds():
    times = load_step_times("h100:llama_3_1_70b:tp4:roofline")
    assert isinstance(times, SheetStepTimes)
    assert (times.device.name, times.model.num_layers, times.tensor, times.form) == (
        "NVIDIA H100 SXM5 80 GB",
        80,
        4,
        "roofline",
    )
    shape = StepShape(num_decodes=1, num_decode_tokens=1, num_decode_context=1)
    assert times.device_s(shape) < load_step_times("h100:llama_3_1_70b:tp4").device_s(shape)


def test_a_16_bit_model_is_held_as_float32_where_the_device_computes_in_nothing_else():
    assert read_model_sizes("demo").dtype == "bfloat16"
    held = load_step_times("cpu:demo").model
    assert (held.dtype, held.weight_bytes, held.activation_bytes) == ("float32", 4, 4)
    assert load_step_times("h100:demo").model == read_model_sizes("demo")
