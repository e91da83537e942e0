"""The fake cache's bytes: what is read from a block and written to another makes them equal."""

from __future__ import annotations

import numpy as np

from trencadis_testing.fake_pool import FakeKVCache


def arrays() -> tuple[np.ndarray, ...]:
    noise = np.random.default_rng(0)
    return tuple(noise.integers(0, 2**60, 20).astype(dtype) for dtype in (np.uint64, np.int64, np.int64))


def test_layout_describes_the_bytes() -> None:
    layout = FakeKVCache(arrays(), block_size=4).layout
    assert layout.block_bytes == 3 * 4 * 8
    assert [part.dtype for part in layout.parts] == ["uint64", "int64", "int64"]


def test_blocks_that_are_read_and_written_elsewhere_are_equal_and_others_untouched() -> None:
    own = arrays()
    before = [array.copy() for array in own]
    pool = FakeKVCache(own, block_size=4)
    data = np.empty((2, pool.layout.block_bytes), np.uint8)
    pool.read_blocks([3, 1], data)
    pool.write_blocks([0, 4], data)
    for array, old in zip(pool, before, strict=True):
        blocks, olds = array.reshape(5, 4), old.reshape(5, 4)
        assert (blocks[0] == olds[3]).all()
        assert (blocks[4] == olds[1]).all()
        assert (blocks[1:4] == olds[1:4]).all()


def test_pool_is_also_its_arrays() -> None:
    own = arrays()
    pool = FakeKVCache(own, block_size=4)
    assert len(pool) == 3
    assert pool[1] is own[1]
    assert list(pool) == list(own)
