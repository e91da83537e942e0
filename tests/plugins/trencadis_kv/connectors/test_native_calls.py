from __future__ import annotations

import threading

import pytest

from trencadis.errors import TransferError
from trencadis.records import TransferCause
from trencadis_kv.connectors.native_calls import AbandonedCalls, NativeCalls

WHAT = "the library"


def calls(left=None, **options):
    return NativeCalls("test", left=left or AbandonedCalls(4), **options)


def test_call_returns_what_it_returns_and_raises_what_it_raises():
    one = calls()
    assert one.run(lambda: 7, timeout_s=5.0, what=WHAT) == 7
    assert one.run(lambda: None, timeout_s=5.0, what=WHAT) is None
    with pytest.raises(ZeroDivisionError):
        one.run(lambda: 1 / 0, timeout_s=5.0, what=WHAT)
    assert one.run(lambda: 8, timeout_s=5.0, what=WHAT) == 8
    one.close()


def test_call_that_takes_too_long_is_left_behind_and_what_it_holds_is_kept_until_it_returns():
    left, ended, go_on = AbandonedCalls(4), threading.Event(), threading.Event()
    one = calls(left, on_end=ended.set)
    with pytest.raises(TransferError, match="did not return within") as caught:
        one.run(go_on.wait, timeout_s=0.01, what=WHAT)
    assert caught.value.cause == TransferCause.DEADLINE
    assert (one.is_left, left.number) == (True, 1)
    one.close()
    assert not ended.is_set(), "the memory was given up under the hands of a call"
    go_on.set()
    assert ended.wait(60.0)
    one._thread.join(60.0)
    assert left.number == 0


def test_interrupt_ends_the_wait():
    one, begun, go_on = calls(), threading.Event(), threading.Event()
    seen = []

    def call():
        begun.set()
        go_on.wait()

    def wait():
        with pytest.raises(TransferError) as caught:
            one.run(call, timeout_s=60.0, what=WHAT)
        seen.append(caught.value.cause)

    thread = threading.Thread(target=wait)
    thread.start()
    assert begun.wait(60.0)
    one.interrupt()
    thread.join(60.0)
    go_on.set()
    assert seen == [TransferCause.CANCELLED]


def test_nothing_runs_after_a_call_was_left_behind():
    one, go_on = calls(), threading.Event()
    with pytest.raises(TransferError):
        one.run(go_on.wait, timeout_s=0.01, what=WHAT)
    with pytest.raises(TransferError, match="were ended"):
        one.run(lambda: 1, timeout_s=5.0, what=WHAT)
    go_on.set()


def test_too_many_calls_left_behind_are_a_store_that_cannot_be_reached():
    left, go_on = AbandonedCalls(2), threading.Event()
    for _ in range(2):
        with pytest.raises(TransferError):
            calls(left).run(go_on.wait, timeout_s=0.01, what=WHAT)
    with pytest.raises(TransferError, match="2 calls on the library have not come back") as caught:
        calls(left).run(lambda: 1, timeout_s=5.0, what=WHAT)
    assert caught.value.cause == TransferCause.UNREACHABLE
    go_on.set()


@pytest.mark.parametrize("num_calls", [0, 1])
def test_close_gives_up_what_is_held_once(num_calls):
    ended = threading.Semaphore(0)
    one = calls(on_end=ended.release)
    for _ in range(num_calls):
        one.run(lambda: 1, timeout_s=5.0, what=WHAT)
    one.close()
    one.close()
    assert ended.acquire(timeout=60.0)
    assert not ended.acquire(timeout=0.05)
