from __future__ import annotations

from trencadis_plugins.observer.prometheus import PrometheusObserver
from trencadis_testing.observer import step_stats

SECONDS, TOKENS = "trencadis_longest_step_seconds", "trencadis_longest_step_tokens"


def longest(observer):
    found = observer.snapshot()
    return found[SECONDS], found[TOKENS]


def test_the_longest_step_is_between_two_commits_and_has_the_tokens_of_the_second():
    observer = PrometheusObserver()
    for now_s, tokens in ((1.0, 4), (1.25, 2048), (1.375, 5)):
        observer.on_step(step_stats(now_s=now_s, num_running=2, num_scheduled_tokens=tokens))
    assert longest(observer) == (0.25, 2048)


def test_time_in_which_nothing_ran_is_no_step():
    observer = PrometheusObserver()
    observer.on_step(step_stats(now_s=1.0, num_running=0, num_scheduled_tokens=4))
    observer.on_step(step_stats(now_s=9.0, num_running=1, num_scheduled_tokens=4))
    assert longest(observer) == (0, 0)


def test_the_longest_step_is_forgotten_after_a_minute():
    observer = PrometheusObserver()
    for now_s in (0.0, 2.0, 2.5, 33.0, 33.25):
        observer.on_step(step_stats(now_s=now_s, num_running=int(now_s not in {2.5, 33.25}), num_scheduled_tokens=1))
    assert longest(observer)[0] == 2.0
    for now_s in (64.0, 64.125, 95.0, 95.25):
        observer.on_step(step_stats(now_s=now_s, num_running=int(now_s in {64.0, 95.0}), num_scheduled_tokens=1))
    assert longest(observer)[0] == 0.25
