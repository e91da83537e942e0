"""Loads from a store: what arrives, what is refused, how they are cancelled, and at which pace they go."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from support.kv.store_parts import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    GatedStore,
    OnlyBackendThread,
    hashes_of,
    make_parts,
    make_pool,
    read,
)
from trencadis.errors import TransferError
from trencadis_kv.interfaces import KVCodec
from trencadis_kv.store.defaults import IdentityCodec
from trencadis_kv.store.loads import Loads
from trencadis_kv.store.messages import LoadOrder
from trencadis_kv.store.shards import RankShard
from trencadis_testing.fake_pool import FakeKVCache
from trencadis_testing.kv_faults import DictStore


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


@pytest.mark.parametrize(("position", "bad"), [(5, 1), (30, 0), (128, 2), (-1, 4)])
@pytest.mark.representatives(4)
def test_broken_object_ends_the_load_and_is_deleted_unless_it_is_of_another_version(house, position, bad):
    one = house()
    one.spoil(bad, flip(position))
    one.parts.recent.add(hashes_of(*range(5)))
    one.start(7, blocks=[4, 2, 9, 1, 3], numbers=range(5))
    (failed,) = one.report().failed
    cause = "incompatible" if position == 5 else "corrupt"
    assert (failed.transfer_id, failed.num_valid_tokens, failed.cause) == (7, 4 * bad, cause)
    one.check(dict(list(zip([4, 2, 9, 1, 3], range(5), strict=True))[:bad]))
    assert (one.keys(bad)[0] in one.objects) == (position == 5)
    assert len(one.objects) == len(CONTENTS) - (position != 5)
    assert one.failures(cause) == 1
    assert bad in one.parts.recent.unknown(hashes_of(*range(5)))


def test_right_bytes_under_another_blocks_key_are_refused(house):
    one = house()
    a, b = one.keys(0, 1)
    one.objects[a], one.objects[b] = one.objects[b], one.objects[a]
    one.start(7, blocks=[4, 2], numbers=[0, 1])
    (failed,) = one.report().failed
    assert (failed.num_valid_tokens, failed.cause) == (0, "corrupt")
    one.check({})


def test_connector_that_does_not_save_deletes_nothing_and_a_store_that_cannot_costs_a_counter(house):
    def refuse(keys):
        raise TransferError("read-only", cause="unreachable")

    for saves in (False, True):
        one = house(saves=saves)
        one.store.delete = refuse
        one.spoil(1, flip(-1))
        one.start(7, blocks=[4, 2], numbers=[0, 1])
        assert one.report().failed[0].cause == "corrupt"
        assert one.failures("unreachable") == saves


def test_store_that_fails_keeps_what_arrived_before(house):
    one = house()
    get = one.store.get
    answers = iter([get, lambda keys, targets: 1 / 0])
    one.store.get = lambda keys, targets: next(answers)(keys, targets)
    one.start(7, blocks=[4, 2, 9, 1, 3], numbers=range(5))
    (failed,) = one.report().failed
    assert (failed.num_valid_tokens, failed.cause) == (8, "raised")
    one.check({4: 0, 2: 1})


class Broken(KVCodec):
    flags = 200
    max_growth_bytes = 0

    def encode(self, payload, header):
        return payload

    def decode(self, data, header, out):
        raise ZeroDivisionError


@pytest.mark.parametrize("what", ["codec", "pool", [], [5], [10**9, 10**9]])
@pytest.mark.representatives(5)
def test_codec_or_pool_that_raises_and_impossible_answers_fail_the_load(house, what):
    one = house(codec=Broken() if what == "codec" else None)
    if what == "pool":
        one.pool.write_blocks = lambda blocks, data: 1 / 0
    elif what != "codec":
        one.store.get = lambda keys, targets: what
    one.start(7, blocks=[4, 2], numbers=[0, 1])
    (failed,) = one.report().failed
    assert failed.num_valid_tokens == 0
    assert (failed.cause == "raised") or isinstance(what, list)
    one.check({})


def test_store_that_is_left_alone_is_not_asked(house):
    one = house(gated=True)
    one.parts.breaker.open()
    one.start(7, blocks=[4], numbers=[0])
    assert one.report().failed[0].cause == "unreachable"
    assert one.store.calls == []


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


# --------------------------------------------------------------------------------- a device with a thread of its own
def test_blocks_of_a_device_are_written_on_its_own_thread_a_share_in_each_step(house):
    one = house(pool=OnlyBackendThread(make_pool()), max_load_bytes_per_step=2 * BLOCK_BYTES)
    one.start(1, blocks=[4, 2, 9, 1, 3], numbers=range(5))
    one.settle()
    one.check({})
    steps = [one.report().loaded for _ in range(4)]
    assert steps == [(), (), (), (1,)]
    one.check({4: 0, 2: 1, 9: 2, 1: 3, 3: 4})


def test_two_loads_share_what_a_step_may_write(house):
    one = house(pool=OnlyBackendThread(make_pool()), max_load_bytes_per_step=3 * BLOCK_BYTES)
    one.start(1, blocks=[4, 2], numbers=[0, 1])
    one.start(2, blocks=[5, 6], numbers=[2, 3])
    one.settle()
    one.loads.poll()
    written = (read(one.pool, range(16)) != one.before).any(axis=1).sum()
    assert written == 2
    one.settle()
    one.loads.poll()
    one.check({4: 0, 2: 1, 5: 2, 6: 3})


def test_block_larger_than_a_steps_share_is_written_alone(house):
    one = house(pool=OnlyBackendThread(make_pool()), max_load_bytes_per_step=1, chunk=1)
    one.start(1, blocks=[4, 2], numbers=[0, 1])
    assert [one.report().loaded for _ in range(3)] == [(), (), (1,)]
    one.check({4: 0, 2: 1})


# ---------------------------------------------------------------------------------------------------- host memory
class HostPool(FakeKVCache):
    """A pool whose blocks lie in host memory, and which wants its rows in one piece, as ever."""

    def view_blocks(self, blocks):
        return [[array[block].data for array in self._bytes] for block in blocks]

    def write_blocks(self, blocks, data):
        assert data.flags.c_contiguous
        super().write_blocks(blocks, data)


class Untouched(IdentityCodec):
    def decode(self, data, header, out):
        raise AssertionError("what no codec changed is copied once")


def host_pool():
    noise = np.random.default_rng(1)
    return HostPool([noise.integers(0, 2**60, 16 * BLOCK_SIZE) for _ in range(2)], block_size=BLOCK_SIZE)


def test_blocks_that_no_codec_changed_go_to_host_memory_from_where_they_were_read(house):
    one = house(pool=host_pool(), codec=Untouched())
    one.start(7, blocks=[4, 2, 9, 1, 3], numbers=range(5))
    assert one.report().loaded == (7,)
    one.check({4: 0, 2: 1, 9: 2, 1: 3, 3: 4})


@pytest.mark.parametrize("position", [1, 30, 90, 128, -1])
@pytest.mark.parametrize("bad", [0, 1, 4])
def test_broken_object_ends_a_load_into_host_memory_too(house, position, bad):
    one = house(pool=host_pool())
    one.spoil(bad, flip(position))
    one.start(7, blocks=[4, 2, 9, 1, 3], numbers=range(5))
    (failed,) = one.report().failed
    assert (failed.num_valid_tokens, failed.cause) == (4 * bad, "corrupt")
    one.check(dict(list(zip([4, 2, 9, 1, 3], range(5), strict=True))[:bad]))


def test_whole_object_of_another_size_is_no_block_of_host_memory(house):
    one = house(pool=host_pool())
    (key,), (block_hash,) = one.keys(1), hashes_of(1)
    one.objects[key] = b"".join(one.packing.pack(block_hash, memoryview(CONTENTS[1][:-8])))
    one.start(7, blocks=[4, 2], numbers=[0, 1])
    (failed,) = one.report().failed
    assert (failed.num_valid_tokens, failed.cause) == (4, "corrupt")
    one.check({4: 0})


__all__ = ["CONTENTS", "House", "flip", "houses"]


CONTENTS = {i: np.random.default_rng(i).integers(0, 256, BLOCK_BYTES, np.uint8) for i in range(9)}


"""Bytes of the blocks that are stored, by their number."""


class House:
    """Loads from a store that has blocks 0 to 8, each with its own content.

    Attributes:
        objects: What is stored, by key.
        before: Bytes of all blocks before any load.
    """

    def __init__(self, *, gated=False, pool=None, chunk=2, codec=None, **settings):
        self.objects = {}
        self.store = GatedStore(self.objects) if gated else DictStore(self.objects)
        self.parts = make_parts(lambda: self.store, codec=codec, **settings)
        self.pool = pool or make_pool()
        self.packing = self.parts.objects(self.pool.layout)
        for number, content in CONTENTS.items():
            (key,), (block_hash,) = self.keys(number), hashes_of(number)
            self.objects[key] = b"".join(self.packing.pack(block_hash, memoryview(content)))
        self.loads = Loads(self.parts, self.pool, [RankShard(objects=self.packing)])
        self.loads.chunk = chunk
        self.before = read(self.pool, range(16))

    def keys(self, *numbers):
        return self.packing.keys(hashes_of(*numbers))

    def start(self, transfer_id, *, blocks, numbers):
        self.loads.start(LoadOrder(transfer_id, list(blocks), hashes_of(*numbers)))

    def settle(self):
        """Wait until no thread works."""
        assert self.parts.activity.wait_idle(60.0)

    def report(self):
        """Wait, and return what has ended."""
        self.settle()
        return self.loads.poll()

    def spoil(self, number, change):
        """Change what is stored of a block."""
        data = bytearray(self.objects[self.keys(number)[0]])
        change(data)
        self.objects[self.keys(number)[0]] = bytes(data)

    def check(self, expected):
        """Check that blocks hold contents, and that all others are as they were."""
        now = read(self.pool, range(16))
        for block in range(16):
            right = CONTENTS[expected[block]] if block in expected else self.before[block]
            assert (now[block] == right).all(), f"block {block}"

    def failures(self, cause):
        return self.parts.counters.value("transfer_failures_total", cause=cause)


def flip(position):

    def change(data):
        data[position] ^= 1

    return change


@contextlib.contextmanager
def houses() -> Iterator[Callable[..., House]]:
    """Give what makes houses; when the block ends, nothing of them may still be at work."""
    made = []

    def make(**options):
        made.append(House(**options))
        return made[-1]

    yield make
    for one in made:
        if isinstance(one.store, GatedStore):
            one.store.open()
        one.loads.close(5.0)
        assert one.parts.activity.wait_idle(60.0), "work is counted that nobody does"
