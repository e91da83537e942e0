from __future__ import annotations

import numpy as np
import pytest

from trencadis.records import FinishedSequence, FinishReason
from trencadis_tools.bench.latencies import Latencies


def end(*, first_s: float | None, finish_s: float, num_tokens: int) -> FinishedSequence:
    return FinishedSequence(
        request_id="r",
        slot=0,
        token_ids=np.zeros(num_tokens, np.int32),
        finish_reason=FinishReason.STOP,
        num_prompt_tokens=1,
        arrival_s=99.0,
        first_token_s=first_s,
        finish_s=finish_s,
    )


def test_times_are_counted_from_the_true_arrival() -> None:
    latencies = Latencies(1.0, 0.5)
    latencies.add(end(first_s=3.0, finish_s=5.0, num_tokens=5), arrival_s=2.5)
    summary = latencies.summary(10.0)
    assert (summary["ttft_mean_s"], summary["tpot_mean_s"], summary["e2e_mean_s"]) == (0.5, 0.5, 2.5)


def test_percentiles_are_of_all_and_of_the_urgent() -> None:
    latencies = Latencies(1.0, 1.0)
    for number in range(101):
        latencies.add(end(first_s=float(number), finish_s=200.0, num_tokens=2), arrival_s=0.0, urgent=number < 51)
    summary = latencies.summary(1.0)
    assert summary["ttft_p99_s"] == pytest.approx(99.0)
    assert summary["urgent_ttft_p99_s"] == pytest.approx(49.5)


@pytest.mark.parametrize(
    ("first_s", "finish_s", "num_tokens", "good"),
    [(1.0, 2.0, 3, 1), (1.01, 2.0, 3, 0), (1.0, 2.01, 3, 0), (1.0, 90.0, 1, 1), (None, 1.0, 0, 0)],
)
def test_goodput_counts_who_kept_both_targets(first_s, finish_s, num_tokens, good) -> None:
    """A text of one token has no pace to keep; one without a token was never answered."""
    latencies = Latencies(1.0, 0.5)
    latencies.add(end(first_s=first_s, finish_s=finish_s, num_tokens=num_tokens), arrival_s=0.0)
    assert latencies.summary(4.0)["goodput"] == good / 4
    assert latencies.summary(4.0)["num_requests"] == 1


def test_of_nothing_everything_is_zero() -> None:
    assert set(Latencies(1.0, 1.0).summary(0.0).values()) == {0}
