"""Devices with static shapes: a step takes the time of its passes' buckets."""

from __future__ import annotations

import pytest

from support.simulation import asked, run
from trencadis.records import Bucket, Phase
from trencadis_tools.simulation.step_times import BucketStepTimes

TIMES = BucketStepTimes(
    times_s={Bucket(1, 64, 0, Phase.PREFILL): 0.064, Bucket(1, 1, 8, Phase.DECODE): 0.01},
    lines={Phase.PREFILL: (0.0, 0.001, 0.0), Phase.DECODE: (0.01, 0.0, 0.0)},
)
"""A prefill takes 1 ms for each position, a decode pass 10 ms."""


def ttft_s(bucketing: str, prompt: int, **options: int) -> float:
    tables = {"bucketing": {"name": bucketing, bucketing: options}, "engine": {"async_scheduling": False}}
    (record,) = run([asked("a", prompt=prompt, output=12)], tables, step_times=TIMES).records
    assert record.e2e_s - record.ttft_s == pytest.approx(11 * 0.01)
    return record.ttft_s


def test_a_prompt_takes_the_time_of_its_bucket() -> None:
    assert ttft_s("linear", 30, prompt_query_min=32, prompt_query_step=32) == pytest.approx(0.032)
    assert ttft_s("linear", 30, prompt_query_min=4, prompt_query_step=12) == pytest.approx(0.036)


def test_a_run_on_a_device_with_static_shapes_is_the_same_each_time() -> None:
    requests = [asked(str(i), 0.02 * i, 20 + 3 * i, 6) for i in range(12)]
    first, again = (run(requests, step_times=TIMES) for _ in range(2))
    assert first == again
    assert all(not record.error for record in first.records)
    fewer = run(requests, {"engine": {"max_num_seqs": 1}}, step_times=TIMES)
    assert first.num_buckets > fewer.num_buckets > 0
