from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from trencadis.activity import ACTIVITY
from trencadis_remote.watch import record_signal
from trencadis_remote.watch.record_signal import RECORD_SIGNAL, ignore_record_signal, record_at_signal


class Recorder:
    """Notes what it is told to write, and on which thread."""

    def __init__(self):
        self.written, self.done = [], threading.Event()

    def dump(self, reason, cause):
        self.written.append((reason, cause, threading.current_thread().name))
        self.done.set()


@pytest.fixture(autouse=True)
def handlers():
    before = signal.getsignal(RECORD_SIGNAL)
    yield
    sink = signal.set_wakeup_fd(-1)
    signal.signal(RECORD_SIGNAL, before)
    if sink >= 0:
        os.close(sink)  # the thread ends


@pytest.mark.parametrize(("beats", "reason"), [(0, "stall"), (1, "signal")])
def test_a_signal_has_another_thread_write_the_record_and_say_whether_the_engine_hangs(monkeypatch, beats, reason):
    recorder = Recorder()
    monkeypatch.setattr(record_signal.time, "sleep", lambda _: [ACTIVITY.beat() for _ in range(beats)])
    record_at_signal([recorder.dump])
    signal.raise_signal(RECORD_SIGNAL)
    assert recorder.done.wait(30)
    assert recorder.written == [(reason, "signal SIGUSR2", "trencadis-flight-record")]


def test_before_there_is_an_engine_the_signal_does_nothing():
    ignore_record_signal()
    signal.raise_signal(RECORD_SIGNAL)
    assert time.monotonic() > 0, "the process lives"
