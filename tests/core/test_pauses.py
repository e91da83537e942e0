from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from trencadis.pauses import Pauses, thread_wait_s


def test_a_pause_counts_as_far_as_it_lies_within_the_time_asked_for() -> None:
    pauses = Pauses()
    pauses.note(30.0)
    assert pauses.within(10.0) == pytest.approx(10.0, rel=0.01)
    assert pauses.within(60.0) == pytest.approx(30.0, rel=0.01)
    assert Pauses().within(10.0) == 0.0


STOPPED = """
import sys, time
from trencadis.pauses import PAUSES
PAUSES.watch()
time.sleep(0.2)
before = time.perf_counter()
print("ready", flush=True)
sys.stdin.readline()
print(PAUSES.within(time.perf_counter() - before), flush=True)
"""


def test_the_sibling_sees_that_a_signal_stopped_the_process() -> None:
    child = subprocess.Popen([sys.executable, "-c", STOPPED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    os.kill(child.pid, signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    threading.Event().wait(0.7)
    os.kill(child.pid, signal.SIGCONT)
    child.stdin.write("\n")
    child.stdin.flush()
    assert float(child.stdout.readline()) > 0.6
    child.communicate()
    assert child.returncode == 0


@pytest.mark.skipif(not os.path.exists("/proc/thread-self/schedstat"), reason="this system does not count waits")
def test_a_thread_that_waits_for_a_processor_is_charged_nothing_for_it() -> None:
    """Two threads of different processes on one processor: each waits about as long as it runs."""
    program = "import time\nend = time.perf_counter() + 20\nwhile time.perf_counter() < end: pass"
    cpu = min(os.sched_getaffinity(0))
    others = [subprocess.Popen(["taskset", "-c", str(cpu), sys.executable, "-c", program]) for _ in range(2)]
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})
    try:
        began_s, used_s, waited_s = time.perf_counter(), time.thread_time(), thread_wait_s()
        while thread_wait_s() - waited_s < 0.1:
            assert time.perf_counter() - began_s < 15
        took_s, used_s = time.perf_counter() - began_s, time.thread_time() - used_s
        assert took_s - used_s >= 0.09
    finally:
        os.sched_setaffinity(0, before)
        for other in others:
            other.kill()
            other.wait()
