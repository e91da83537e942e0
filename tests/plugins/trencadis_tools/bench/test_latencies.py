from __future__ import annotations

import math

import pytest

from trencadis_tools.bench.latencies import Latencies
from trencadis_tools.simulation import RequestRecord
from trencadis_tools.workloads import WorkloadRequest


def record(
    *, first_s: float, finish_s: float, num_tokens: int, sent_s: float = 0.0, priority: int = 1
) -> RequestRecord:
    request = WorkloadRequest(
        request_id="r",
        arrival_s=0.0,
        num_prompt_tokens=1,
        num_output_tokens=9,
        priority=priority,
        ttft_target_s=1.0,
        tpot_target_s=0.5,
    )
    return RequestRecord(
        request=request, sent_s=sent_s, first_token_s=first_s, finished_s=finish_s, num_output_tokens=num_tokens
    )


def test_times_are_counted_from_when_it_was_sent() -> None:
    latencies = Latencies()
    latencies.add(record(first_s=3.0, finish_s=5.0, num_tokens=5, sent_s=2.5))
    summary = latencies.summary(10.0)
    assert (summary["ttft_mean_s"], summary["tpot_mean_s"], summary["e2e_mean_s"]) == (0.5, 0.5, 2.5)


def test_percentiles_are_of_all_and_of_the_urgent() -> None:
    latencies = Latencies()
    for number in range(101):
        latencies.add(record(first_s=float(number), finish_s=200.0, num_tokens=2, priority=int(number > 50)))
    summary = latencies.summary(1.0)
    assert summary["ttft_p99_s"] == pytest.approx(99.0)
    assert summary["urgent_ttft_p99_s"] == pytest.approx(49.5)


@pytest.mark.parametrize(
    ("first_s", "finish_s", "num_tokens", "good"),
    [(1.0, 2.0, 3, 1), (1.01, 2.0, 3, 0), (1.0, 2.01, 3, 0), (1.0, 90.0, 1, 1), (math.nan, 1.0, 0, 0)],
)
def test_goodput_counts_who_kept_both_targets(first_s, finish_s, num_tokens, good) -> None:
    """A text of one token has no pace to keep; one without a token was never answered."""
    latencies = Latencies()
    latencies.add(record(first_s=first_s, finish_s=finish_s, num_tokens=num_tokens))
    assert latencies.summary(4.0)["goodput"] == good / 4
    assert latencies.summary(4.0)["num_requests"] == 1


def test_of_nothing_everything_is_zero() -> None:
    assert set(Latencies().summary(0.0).values()) == {0}
