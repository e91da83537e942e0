"""Loads into the pool of a device with a thread of its own, and into one in host memory."""

from __future__ import annotations

import numpy as np
import pytest

from support.kv.checked_loads import CONTENTS, flip, houses
from support.kv.store_parts import BLOCK_BYTES, BLOCK_SIZE, OnlyBackendThread, hashes_of, make_parts, make_pool, read
from trencadis_kv.store.defaults import IdentityCodec
from trencadis_kv.store.loads import Loads
from trencadis_testing.fake_pool import FakeKVCache


@pytest.fixture
def house():
    with houses() as make:
        yield make


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


def test_chunk_is_no_larger_than_a_steps_share():
    pool = OnlyBackendThread(make_pool())
    parts = make_parts(max_load_bytes_per_step=3 * BLOCK_BYTES)
    assert Loads(parts, pool, parts.of_rank([pool.layout])[0]).chunk == 3


def test_block_larger_than_a_steps_share_is_written_alone(house):
    one = house(pool=OnlyBackendThread(make_pool()), max_load_bytes_per_step=1, chunk=1)
    one.start(1, blocks=[4, 2], numbers=[0, 1])
    assert [one.report().loaded for _ in range(3)] == [(), (), (1,)]
    one.check({4: 0, 2: 1})


def test_load_that_waits_for_the_devices_thread_is_cancelled(house):
    one = house(pool=OnlyBackendThread(make_pool()))
    one.start(1, blocks=[4, 2, 9], numbers=[0, 1, 2])
    one.settle()
    one.loads.cancel(1)
    assert one.report().released == (1,)
    one.check({})


def test_device_that_raises_fails_the_load(house):
    one = house(pool=OnlyBackendThread(make_pool()))
    one.pool._pool.write_blocks = lambda blocks, data: 1 / 0
    one.start(1, blocks=[4, 2, 9], numbers=[0, 1, 2])
    one.settle()
    one.loads.poll()
    (failed,) = one.report().failed
    assert (failed.num_valid_tokens, failed.cause) == (0, "raised")


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
