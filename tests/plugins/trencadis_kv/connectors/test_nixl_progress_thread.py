from __future__ import annotations

import threading

from trencadis_kv.connectors.nixl.agent import ProgressThread


def test_function_runs_while_somebody_needs_it_and_not_otherwise():
    calls = threading.Semaphore(0)
    pump = ProgressThread(calls.release)
    assert not calls.acquire(timeout=0.02)
    pump.begin()
    pump.begin()
    for _ in range(3):
        assert calls.acquire(timeout=5.0)
    pump.end()
    while calls.acquire(blocking=False):
        pass
    assert calls.acquire(timeout=5.0), "one still needs it"
    pump.end()
    while calls.acquire(timeout=0.05):
        pass
    assert not calls.acquire(timeout=0.05)
    pump.begin()
    assert calls.acquire(timeout=5.0)
    pump.close()


def test_nothing_runs_after_close():
    calls = threading.Semaphore(0)
    pump = ProgressThread(calls.release)
    pump.begin()
    assert calls.acquire(timeout=5.0)
    pump.close()
    pump.close()
    while calls.acquire(blocking=False):
        pass
    assert not calls.acquire(timeout=0.02)
    pump.begin()
    assert not calls.acquire(timeout=0.02)
