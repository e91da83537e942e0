"""Loads from a store: what arrives, what is refused, how they are cancelled, and at which pace they go."""

from __future__ import annotations

import threading
import time

import pytest

from support.kv.checked_loads import CONTENTS, flip, houses
from support.kv.store_parts import hashes_of
from trencadis.errors import TransferError
from trencadis_kv.interfaces import KVCodec


@pytest.fixture
def house():
    with houses() as make:
        yield make


def test_load_fills_its_blocks_and_no_other(house):
    one = house()
    one.start(7, blocks=[4, 2, 9, 1, 3], numbers=[0, 1, 2, 3, 4])
    report = one.report()
    assert (report.loaded, report.failed, report.released) == ((7,), (), ())
    one.check({4: 0, 2: 1, 9: 2, 1: 3, 3: 4})
    assert one.parts.counters.value("tokens_total", direction="load") == 20


def test_end_of_a_load_is_reported_once(house):
    one = house()
    one.start(7, blocks=[4], numbers=[0])
    assert one.report().loaded == (7,)
    assert one.report().loaded == ()


@pytest.mark.parametrize("position", [1, 30, 60, 90, 128, -1])
@pytest.mark.parametrize("bad", [0, 1, 2, 4])
def test_broken_object_ends_the_load_and_is_deleted(house, position, bad):
    one = house()
    one.spoil(bad, flip(position))
    one.parts.recent.add(hashes_of(*range(5)))
    one.start(7, blocks=[4, 2, 9, 1, 3], numbers=range(5))
    (failed,) = one.report().failed
    assert (failed.transfer_id, failed.num_valid_tokens, failed.cause) == (7, 4 * bad, "corrupt")
    one.check(dict(list(zip([4, 2, 9, 1, 3], range(5), strict=True))[:bad]))
    assert one.keys(bad)[0] not in one.objects
    assert len(one.objects) == len(CONTENTS) - 1
    assert one.failures("corrupt") == 1
    assert bad in one.parts.recent.unknown(hashes_of(*range(5)))


def test_right_bytes_under_another_blocks_key_are_refused(house):
    one = house()
    a, b = one.keys(0, 1)
    one.objects[a], one.objects[b] = one.objects[b], one.objects[a]
    one.start(7, blocks=[4, 2], numbers=[0, 1])
    (failed,) = one.report().failed
    assert (failed.num_valid_tokens, failed.cause) == (0, "corrupt")
    one.check({})


def test_object_of_another_version_is_refused_and_left_there(house):
    one = house()
    one.spoil(1, flip(5))
    one.start(7, blocks=[4, 2], numbers=[0, 1])
    (failed,) = one.report().failed
    assert (failed.num_valid_tokens, failed.cause) == (4, "incompatible")
    assert one.keys(1)[0] in one.objects


def test_connector_that_does_not_save_deletes_nothing(house):
    one = house(saves=False)
    one.spoil(1, flip(-1))
    one.start(7, blocks=[4, 2], numbers=[0, 1])
    assert one.report().failed[0].cause == "corrupt"
    assert one.keys(1)[0] in one.objects


def test_evicted_object_is_everyday_life(house):
    one = house(failure_limit=1)
    del one.objects[one.keys(3)[0]]
    one.start(7, blocks=[4, 2, 9, 1, 3], numbers=range(5))
    (failed,) = one.report().failed
    assert (failed.num_valid_tokens, failed.cause) == (12, "evicted")
    assert one.parts.breaker.allows
    one.check({4: 0, 2: 1, 9: 2})


def test_store_that_fails_keeps_what_arrived_before(house):
    one = house()
    get = one.store.get
    answers = iter([get, lambda keys, targets: 1 / 0])
    one.store.get = lambda keys, targets: next(answers)(keys, targets)
    one.start(7, blocks=[4, 2, 9, 1, 3], numbers=range(5))
    (failed,) = one.report().failed
    assert (failed.num_valid_tokens, failed.cause) == (8, "raised")
    one.check({4: 0, 2: 1})


@pytest.mark.parametrize("sizes", [[], [5], [10**9, 10**9]])
def test_impossible_answers_are_failures(house, sizes):
    one = house()
    one.store.get = lambda keys, targets: sizes
    one.start(7, blocks=[4, 2], numbers=[0, 1])
    (failed,) = one.report().failed
    assert failed.num_valid_tokens == 0
    one.check({})


def test_object_longer_than_a_block_is_refused(house):
    one = house()
    one.objects[one.keys(0)[0]] += b"x"
    one.start(7, blocks=[4], numbers=[0])
    assert one.report().failed[0].num_valid_tokens == 0
    one.check({})


def test_codec_that_raises_fails_the_load(house):
    class Broken(KVCodec):
        flags = 200
        max_growth_bytes = 0

        def encode(self, payload, header):
            return payload

        def decode(self, data, header, out):
            raise ZeroDivisionError

    one = house(codec=Broken())
    one.start(7, blocks=[4], numbers=[0])
    (failed,) = one.report().failed
    assert (failed.num_valid_tokens, failed.cause) == (0, "raised")


def test_pool_that_raises_fails_the_load(house):
    one = house()
    one.pool.write_blocks = lambda blocks, data: 1 / 0
    one.start(7, blocks=[4], numbers=[0])
    (failed,) = one.report().failed
    assert (failed.num_valid_tokens, failed.cause) == (0, "raised")


def test_store_that_is_left_alone_is_not_asked(house):
    one = house(gated=True)
    one.parts.breaker.open()
    one.start(7, blocks=[4], numbers=[0])
    assert one.report().failed[0].cause == "unreachable"
    assert one.store.calls == []


def test_store_that_fails_to_delete_costs_a_counter(house):
    one = house()
    one.spoil(0, flip(-1))

    def refuse(keys):
        raise TransferError("read-only", cause="unreachable")

    one.store.delete = refuse
    one.start(1, blocks=[4], numbers=[0])
    assert one.report().failed[0].cause == "corrupt"
    assert one.failures("unreachable") == 1


# ---------------------------------------------------------------------------------------------------- cancelling


def test_queued_load_that_is_cancelled_is_released_and_never_begun(house):
    one = house(gated=True, num_load_threads=1)
    one.start(1, blocks=[4], numbers=[0])
    assert one.store.is_waiting.wait(60.0)
    one.start(2, blocks=[5], numbers=[1])
    one.loads.cancel(2)
    assert one.loads.poll().released == (2,)
    one.store.open()
    report = one.report()
    assert (report.loaded, report.released) == ((1,), ())
    one.check({4: 0})


def test_load_that_waits_for_the_store_is_released_at_once_and_interrupted(house):
    one = house(gated=True)
    one.start(1, blocks=[4], numbers=[0])
    assert one.store.is_waiting.wait(60.0)
    one.loads.cancel(1)
    assert one.loads.poll().released == (1,)
    one.settle()  # the gate is closed still: only the interruption ends the call
    report = one.loads.poll()
    assert (report.loaded, report.failed, report.released) == ((), (), ())
    assert one.failures("unreachable") == 0
    one.check({})


def test_bytes_that_come_after_the_release_touch_no_block(house):
    one = house(gated=True)
    one.store.interrupt = lambda: None  # a transport that cannot be stopped
    one.start(1, blocks=[4, 2], numbers=[0, 1])
    assert one.store.is_waiting.wait(60.0)
    one.loads.cancel(1)
    assert one.loads.poll().released == (1,)
    one.store.open()
    one.settle()
    one.check({})


def test_interruption_that_came_too_early_is_repeated(house):
    one = house(gated=True)
    interrupt, calls = one.store.interrupt, []
    one.store.interrupt = lambda: calls.append(1) if not calls else interrupt()
    one.start(1, blocks=[4], numbers=[0])
    assert one.store.is_waiting.wait(60.0)
    one.loads.cancel(1)
    one.loads.poll()
    one.settle()
    assert len(calls) == 1


def test_load_that_ended_before_it_was_cancelled_is_released_and_not_reported(house):
    one = house()
    one.start(1, blocks=[4], numbers=[0])
    one.settle()
    one.loads.cancel(1)
    report = one.loads.poll()
    assert (report.loaded, report.failed, report.released) == ((), (), (1,))


def test_load_that_was_reported_before_it_was_cancelled_is_released(house):
    one = house()
    one.start(1, blocks=[4], numbers=[0])
    assert one.report().loaded == (1,)
    one.loads.cancel(1)
    assert one.loads.poll().released == (1,)


def test_cancelling_waits_for_the_copy_that_is_being_made(house):
    one = house()
    get, write, copying, go_on = one.store.get, one.pool.write_blocks, threading.Event(), threading.Event()
    cancelling = threading.Thread(target=one.loads.cancel, args=(1,))

    def slow(blocks, data):
        copying.set()
        assert go_on.wait(60.0)
        write(blocks, data)

    def get_behind_the_cancellation(keys, targets):
        if copying.is_set():
            cancelling.join(60.0)
        return get(keys, targets)

    one.pool.write_blocks, one.store.get = slow, get_behind_the_cancellation
    one.start(1, blocks=[4, 2, 9], numbers=[0, 1, 2])
    assert copying.wait(60.0)
    cancelling.start()
    cancelling.join(0.02)
    assert cancelling.is_alive(), "the release did not wait"
    go_on.set()
    cancelling.join(60.0)
    assert one.report().released == (1,)
    one.check({4: 0, 2: 1})


def test_closing_touches_no_block_afterwards(house):
    one = house(gated=True)
    one.start(1, blocks=[4], numbers=[0])
    one.start(2, blocks=[5], numbers=[1])
    assert one.store.is_waiting.wait(60.0)
    one.loads.close(5.0)
    one.store.open()
    one.settle()
    one.check({})
    one.start(3, blocks=[6], numbers=[2])
    assert one.loads.poll().failed[0].cause == "cancelled"


def test_closing_interrupts_every_call_that_waits(house, caplog):
    """Two threads may wait in one store: each is interrupted, whoever of them notices first."""
    one = house(gated=True, num_load_threads=2)
    one.start(1, blocks=[4], numbers=[0])
    one.start(2, blocks=[5], numbers=[1])
    until_s = time.monotonic() + 10.0
    while one.store.num_waiting < 2:
        assert time.monotonic() < until_s, "one of two threads does not come to the store"
        threading.Event().wait(0.001)
    one.loads.close(10.0)
    assert one.store.num_waiting == 0
    assert "does not end" not in caplog.text


# ------------------------------------------------------------------------------------------------------- its pace


def test_load_that_rests_ends_when_it_is_cancelled(house):
    """Its rest is an hour: who waited for the end of it would wait for the test's end."""
    one = house(load_share=0.25)
    rests = threading.Event()
    load_pace = one.parts.pace.load

    def slow(num_tokens, *, wait_s):
        pace = load_pace(num_tokens, wait_s=wait_s)
        pace.rest_s = lambda done: rests.set() or 3600.0
        return pace

    one.parts.pace.load = slow
    one.start(1, blocks=[4, 2, 9], numbers=[0, 1, 2])
    assert rests.wait(60.0)
    one.loads.cancel(1)
    assert one.report().released == (1,)
    one.check({4: 0, 2: 1})


def test_loads_that_ended_or_were_cancelled_slow_nobody_down(house):
    one = house(gated=True, num_load_threads=1, load_share=0.5)
    assert not one.parts.pace.is_needed, "these blocks do not lie in host memory"
    one.parts.pace.is_needed = True
    one.parts.pace.stepped(device_s=10.0)
    assert one.parts.pace.rest_ratio == 1.0
    one.start(1, blocks=[4], numbers=[0])
    assert one.store.is_waiting.wait(60.0)
    one.start(2, blocks=[5], numbers=[1])
    assert one.parts.pace.rest_ratio == 0.5  # a second one waits
    one.loads.cancel(2)
    assert one.parts.pace.rest_ratio == 1.0
    one.store.open()
    assert one.report().loaded == (1,)
    assert one.parts.pace.load(4, wait_s=1.0) is not None
    assert one.parts.pace.rest_ratio == 0.5  # this one waits, nobody else is there
