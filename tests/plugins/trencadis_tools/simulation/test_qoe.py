from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.simulation import asked, run
from trencadis_tools.simulation import RequestRecord
from trencadis_tools.simulation.qoe import qoe_of, qoe_v1_of, shown_times
from trencadis_tools.simulation.run import token_gaps_s

TARGETS = {"ttft_target_s": 1.0, "tpot_target_s": 0.5}


def record(times_s: list[float] | None, *, sent_s: float = 0.0, error: str = "", **targets: float) -> RequestRecord:
    """An answer whose tokens came so long after it was sent."""
    times = None if times_s is None else np.array(times_s, np.float64) + sent_s
    return RequestRecord(
        request=asked("a", **{**TARGETS, **targets}),
        sent_s=sent_s,
        first_token_s=math.nan if times is None else times[0],
        finished_s=math.nan if times is None else times[-1],
        num_output_tokens=0 if times is None else len(times),
        error=error,
        token_times_s=times,
    )


@pytest.mark.parametrize(
    ("times_s", "second", "first"),
    [
        ([1.0, 1.5, 2.0], 1.0, 1.0),
        ([0.1, 0.2, 0.3], 1.0, 1.0),  # all at once and early: read at the pace
        # Expected 1, 1.5, 2; shown 2, 2.5, 3: 4.5 by 7.5. Read until 3.5: areas 1.25 + 0.75 + 0.25 of 2.25 + 1.75 + 1.25.
        ([2.0, 2.0, 2.0], 4.5 / 7.5, 2.25 / 5.25),
        # A pause: shown 1, 1.5, 4.
        ([0.5, 1.0, 4.0], 4.5 / 6.5, (3.25 + 2.75 + 0.25) / (3.25 + 2.75 + 2.25)),
        # The last token comes early and makes up for nothing: shown 3, 3.5, 4.
        ([3.0, 3.1, 3.2], 4.5 / 10.5, 2.25 / 8.25),
        ([5.0], 0.2, 0.25 / 4.25),
    ],
)
def test_small_timelines_by_hand(times_s: list[float], second: float, first: float) -> None:
    for sent_s in (0.0, 7.0):
        assert qoe_of(record(times_s, sent_s=sent_s)) == pytest.approx(second)
        assert qoe_v1_of(record(times_s, sent_s=sent_s)) == pytest.approx(first)


def test_without_targets_or_times_there_is_no_value_and_without_an_answer_none_of_it() -> None:
    for qoe in (qoe_of, qoe_v1_of):
        assert math.isnan(qoe(record(None)))
        assert math.isnan(qoe(record([1.0], ttft_target_s=math.inf)))
        assert math.isnan(qoe(record([1.0], tpot_target_s=math.inf)))
        assert math.isnan(qoe(record(None, error="refused", tpot_target_s=math.inf)))
        assert qoe(record(None, error="refused")) == 0.0


timelines = st.lists(st.floats(0, 5), min_size=1, max_size=8).map(lambda gaps: np.cumsum(gaps).tolist())


def read_by(start_s: float, pace_s: float, moments: np.ndarray) -> np.ndarray:
    """How much of a token, shown at a moment, is read by others."""
    return np.clip((moments - start_s) / pace_s, 0, 1)


@given(times_s=timelines, ttft_s=st.floats(0.05, 5), tpot_s=st.floats(0.05, 2))
def test_areas_are_those_of_a_reader_who_is_watched_moment_by_moment(times_s, ttft_s, tpot_s) -> None:
    one = record(times_s, ttft_target_s=ttft_s, tpot_target_s=tpot_s)
    shown, free_s = [], ttft_s
    for time_s in times_s:
        shown.append(max(time_s, free_s))
        free_s = shown[-1] + tpot_s
    assert shown_times(np.array(times_s), ttft_target_s=ttft_s, tpot_target_s=tpot_s) == pytest.approx(shown)
    expected = [ttft_s + number * tpot_s for number in range(len(times_s))]

    edges = np.linspace(0, free_s, 20_001)
    moments = (edges[1:] + edges[:-1]) / 2  # midpoint rule
    below = [sum(read_by(start_s, tpot_s, moments).mean() for start_s in curve) for curve in (shown, expected)]
    assert qoe_v1_of(one) == pytest.approx(below[0] / below[1], rel=2e-3)
    left = [sum((moments < start_s).mean() for start_s in curve) for curve in (shown, expected)]
    assert qoe_of(one) == pytest.approx(left[1] / left[0], rel=2e-3, abs=2e-3)


@given(
    times_s=timelines,
    ttft_s=st.floats(0.05, 5),
    tpot_s=st.floats(0.05, 2),
    later=st.integers(0, 7),
    by_s=st.floats(0, 3),
)
def test_it_lies_between_0_and_1_and_a_token_that_comes_later_never_raises_it(
    times_s, ttft_s, tpot_s, later, by_s
) -> None:
    targets = {"ttft_target_s": ttft_s, "tpot_target_s": tpot_s}
    delayed = np.maximum.accumulate([time_s + by_s * (i == later) for i, time_s in enumerate(times_s)]).tolist()
    before, after = qoe_of(record(times_s, **targets)), qoe_of(record(delayed, **targets))
    assert 0 < after <= before + 1e-12
    assert before <= 1 + 1e-12
    in_time = [min(time_s, ttft_s + i * tpot_s) for i, time_s in enumerate(times_s)]
    assert qoe_of(record(in_time, **targets)) == pytest.approx(1.0)


def test_gaps_are_those_of_all_answers_and_the_longest_is_known() -> None:
    records = [record([1.0, 1.5, 3.0]), record([2.0]), record(None), record([1.0, 1.25])]
    assert token_gaps_s(records).tolist() == [0.5, 1.5, 0.25]
    assert [one.max_itl_s for one in records] == pytest.approx([1.5, math.nan, math.nan, 0.25], nan_ok=True)
    assert token_gaps_s([]).tolist() == []


def test_a_run_has_no_times_of_tokens_unless_they_are_asked_for() -> None:
    requests = [asked("a", output=6), asked("b", 0.05, output=3)]
    without, having = run(requests), run(requests, token_times=True)
    assert all(one.token_times_s is None for one in without.records)
    for one, other in zip(having.records, without.records, strict=True):
        assert one.token_times_s is not None
        assert len(one.token_times_s) == one.num_output_tokens == other.num_output_tokens
        assert (one.token_times_s[0], one.token_times_s[-1]) == (other.first_token_s, other.finished_s)
    assert having == run(requests, token_times=True)
    assert having != without
