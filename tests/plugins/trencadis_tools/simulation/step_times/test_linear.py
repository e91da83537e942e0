"""Linear step times, by hand and against the older model of records."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trencadis.records import StepShape, StepTime
from trencadis_tools.simulation.step_times import LinearStepTimes

_COUNT = st.integers(0, 200_000)


@given(decodes=_COUNT, prefills=_COUNT, decode_context=_COUNT, prefill_context=_COUNT)
def test_defaults_are_those_of_the_step_time_of_records_to_the_last_digit(
    decodes, prefills, decode_context, prefill_context
):
    shape = StepShape(
        num_decodes=decodes,
        num_decode_tokens=decodes,
        num_prefills=min(1, prefills),
        num_prefill_tokens=prefills,
        num_decode_context=decode_context,
        num_prefill_context=prefill_context,
        prefill_products=prefills * 17.5,
    )
    num_tokens = decodes + prefills
    expected = StepTime().step_s(float(num_tokens), decode_context + prefill_context) if num_tokens else 0.0
    assert LinearStepTimes().device_s(shape) == expected
    assert LinearStepTimes().host_s(shape) == 0.0


def test_every_coefficient_counts_its_own_size():
    shape = StepShape(
        num_decodes=2,
        num_prefills=1,
        num_decode_tokens=2,
        num_prefill_tokens=10,
        num_decode_context=30,
        num_prefill_context=14,
        prefill_products=95.0,
        num_new=1,
    )
    times = LinearStepTimes(
        base_s=1e6,
        token_s=1e4,
        context_s=1e2,
        product_s=1.0,
        row_s=1e-2,
        host_base_s=7.0,
        host_row_s=0.1,
        host_new_s=0.01,
    )
    assert times.device_s(shape) == pytest.approx(1e6 + 12e4 + 44e2 + 95 + 3e-2, rel=1e-15)
    assert times.host_s(shape) == pytest.approx(7.31, rel=1e-15)


def test_overlapped_host_time_counts_where_it_exceeds_the_devices():
    shape = StepShape(num_decodes=1, num_decode_tokens=1, num_decode_context=1)
    sizes = {"token_s": 0.0, "context_s": 0.0, "overlap": True}
    assert LinearStepTimes(base_s=2.0, host_base_s=3.0, **sizes).host_s(shape) == 1.0
    assert LinearStepTimes(base_s=3.0, host_base_s=2.0, **sizes).host_s(shape) == 0.0


def test_negative_coefficients_are_refused():
    with pytest.raises(ValueError, match="row_s"):
        LinearStepTimes(row_s=-1e-9)
