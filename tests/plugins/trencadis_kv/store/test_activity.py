from __future__ import annotations

import threading

from trencadis_kv.store.activity import Activity


def test_nothing_under_way_is_idle_at_once():
    assert Activity().wait_idle(0.0)


def test_waiting_ends_when_the_last_task_does():
    activity = Activity()
    activity.begin(2)
    threading.Thread(target=lambda: (activity.end(), activity.end())).start()
    assert activity.wait_idle(60.0)


def test_waiting_gives_up_when_the_time_is_over():
    activity = Activity()
    activity.begin(2)
    activity.end()
    assert not activity.wait_idle(0.0)
