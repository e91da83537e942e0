from __future__ import annotations

import logging

import pytest

from trencadis_plugins.observer.config import LogObserverConfig
from trencadis_plugins.observer.log import LogObserver
from trencadis_testing.observer import ObserverConformance, step_stats

WORK = {"num_running": 1, "num_scheduled_tokens": 1, "num_padded_tokens": 1}
"""Of a step after which there is more to do."""


def test_an_interval_of_nothing_is_refused():
    with pytest.raises(ValueError, match="interval_s"):
        LogObserverConfig(interval_s=0.0)


class TestLogObserver(ObserverConformance):
    make = LogObserver


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, logger="trencadis.stats")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "trencadis.stats"]


def test_line_holds_the_sums_and_rates_of_its_window(lines):
    observer = LogObserver()
    observer.on_step(
        step_stats(now_s=100.0, num_running=1, num_emitted_tokens=4, num_preempted=1, num_padded_tokens=30)
    )
    observer.on_step(
        step_stats(
            now_s=108.0,
            num_running=7,
            num_waiting=3,
            num_prompt_tokens_admitted=400,
            num_prompt_tokens_cached=100,
            num_emitted_tokens=12,
            num_scheduled_tokens=60,
            num_padded_tokens=50,
            num_preempted=2,
            num_used_blocks=30,
            num_cached_blocks=10,
            num_free_blocks=20,
        )
    )
    assert lines() == [
        "running 7, waiting 3 | prompt 50.0 tok/s, output 2.0 tok/s | cache used 50.0 %, prefix hits 25.0 % | "
        "padding 25.0 % | preemptions 3 | steps 2 in 8.0 s"
    ]


def test_no_line_is_written_before_the_interval_is_over(lines):
    observer = LogObserver(LogObserverConfig(interval_s=2.0))
    for tenths in range(61):
        observer.on_step(step_stats(now_s=tenths / 8, **WORK))
    assert [line.rpartition("| ")[2] for line in lines()] == [
        "steps 17 in 2.0 s",
        "steps 16 in 2.0 s",
        "steps 16 in 2.0 s",
    ]


def test_each_line_counts_only_its_own_window(lines):
    observer = LogObserver()
    for now_s, num_tokens in [(0.0, 0), (5.0, 50), (10.0, 100)]:
        observer.on_step(step_stats(now_s=now_s, num_emitted_tokens=num_tokens, **WORK))
    assert "output 10.0 tok/s" in lines()[0]
    assert "output 20.0 tok/s" in lines()[1]


def test_close_writes_what_is_left_once(lines):
    observer = LogObserver()
    observer.on_step(step_stats(now_s=1.0, **WORK))
    observer.on_step(step_stats(now_s=2.0, num_emitted_tokens=3, num_running=1))
    observer.close()
    observer.close()
    (line,) = lines()
    assert line.startswith("running 1, ")
    assert "output 3.0 tok/s" in line


def test_close_writes_nothing_after_a_line_that_counted_all(lines):
    observer = LogObserver()
    observer.on_step(step_stats(now_s=0.0, **WORK))
    observer.on_step(step_stats(now_s=5.0, **WORK))
    observer.close()
    assert len(lines()) == 1


def test_time_without_work_is_in_no_line(lines):
    """Two requests, 700 s apart: each has a line of its own as soon as it is done, from the beginning of its first step."""
    observer = LogObserver()
    for start_s in (10.0, 710.0):
        observer.on_step(step_stats(now_s=start_s + 0.5, plan_s=0.1, device_s=0.3, commit_s=0.1, **WORK))
        observer.on_step(step_stats(now_s=start_s + 1.0, num_emitted_tokens=1, num_prompt_tokens_admitted=3))
        observer.on_step(step_stats(now_s=start_s + 600.0))
    assert (
        lines()
        == [
            "running 0, waiting 0 | prompt 3.0 tok/s, output 1.0 tok/s | cache used 0.0 %, prefix hits 0.0 % | "
            "padding 0.0 % | preemptions 0 | steps 2 in 1.0 s"
        ]
        * 2
    )


def test_steps_without_a_token_make_no_line(lines):
    observer = LogObserver()
    for now_s in range(12):
        observer.on_step(step_stats(now_s=float(now_s), num_waiting=1))
    observer.on_step(step_stats(now_s=12.0, num_emitted_tokens=4))
    observer.on_step(step_stats(now_s=13.0))
    observer.close()
    (line,) = lines()
    assert line.endswith("steps 2 in 2.0 s")


def test_ratios_without_a_denominator_are_zero(lines):
    observer = LogObserver()
    observer.on_step(step_stats(num_emitted_tokens=1))
    assert lines() == [
        "running 0, waiting 0 | prompt 0.0 tok/s, output 0.0 tok/s | cache used 0.0 %, prefix hits 0.0 % | "
        "padding 0.0 % | preemptions 0 | steps 1 in 0.0 s"
    ]


def test_line_says_what_became_of_drafts_if_there_were_any(lines):
    observer = LogObserver()
    observer.on_step(step_stats(now_s=1.0, num_drafted_sequences=2, num_draft_tokens=6, num_accepted_tokens=4, **WORK))
    observer.on_step(step_stats(now_s=6.0, num_drafted_sequences=2, num_draft_tokens=2, num_accepted_tokens=0, **WORK))
    observer.on_step(step_stats(now_s=11.0, **WORK))
    assert "preemptions 0 | drafts 8, accepted 50.0 %, mean acceptance length 2.00 | steps 2 in 5.0 s" in lines()[0]
    assert "drafts" not in lines()[1]


def test_short_requests_share_a_line_and_the_time_between_them_is_not_in_it(lines):
    """Ten in ten seconds, each a tenth of a second: the first is told at once, the others once for five seconds."""
    observer = LogObserver()
    for start_s in range(10):
        observer.on_step(step_stats(now_s=start_s + 0.1, device_s=0.1, num_emitted_tokens=1))
        observer.on_step(step_stats(now_s=start_s + 0.5))
    observer.close()
    assert [line.rpartition("| ")[2] for line in lines()] == [
        "steps 1 in 0.1 s",
        "steps 5 in 0.5 s",
        "steps 4 in 0.4 s",
    ]
    assert all("output 10.0 tok/s" in line for line in lines())
