from __future__ import annotations

import math

import pytest

from trencadis.records import StepTime

MODEL = StepTime(base_s=0.01, token_s=0.0001, context_token_s=1e-6)


def test_a_step_is_a_sum_of_three() -> None:
    assert MODEL.step_s(100.0, 5000) == pytest.approx(0.01 + 0.01 + 0.005)


@pytest.mark.parametrize("num_context_tokens", [0, 4000])
def test_the_most_tokens_fill_the_time_exactly(num_context_tokens: int) -> None:
    most = MODEL.max_tokens(0.05, num_context_tokens)
    assert MODEL.step_s(most, num_context_tokens) == pytest.approx(0.05)


def test_in_less_than_an_empty_step_nothing_is_computed() -> None:
    assert MODEL.max_tokens(0.009) == MODEL.max_tokens(0.012, 3000) == 0.0


def test_tokens_that_cost_nothing_have_no_limit() -> None:
    assert StepTime(base_s=0.01, token_s=0.0).max_tokens(0.02) == math.inf


@pytest.mark.parametrize("field", ["base_s", "token_s", "context_token_s"])
def test_time_does_not_run_backwards(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        StepTime(**{field: -1e-9})
