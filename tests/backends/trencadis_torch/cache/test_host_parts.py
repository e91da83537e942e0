from __future__ import annotations

import sys
import threading
import time

import numpy as np
import pytest

from trencadis_torch.cache.host_parts import HostParts

SIZES = [6, 6, 4, 4]
"""Of two layers: keys of 6 bytes, values of 4."""


@pytest.fixture(params=[SIZES, [5, 5, 5, 5], [6, 2, 2, 6], [3, 1]], ids=str)
def filled(request):
    parts = HostParts(request.param, 9)
    noise = np.random.default_rng(0)
    for rows in parts.rows:
        rows[:] = noise.integers(0, 256, rows.shape, np.uint8)
    return parts


def expected(parts, blocks):
    return np.array([np.concatenate([rows[block] for rows in parts.rows]) for block in blocks])


BLOCKS = ([4], [1, 2, 3], [8, 0, 1, 5, 4, 6, 7], np.array([2, 7], np.int32))


@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
def test_block_is_its_rows_one_behind_the_other(filled, blocks):
    out = np.zeros((len(blocks), sum(rows.shape[1] for rows in filled.rows)), np.uint8)
    filled.read(blocks, out)
    assert (out == expected(filled, blocks)).all()


@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
def test_blocks_are_written_and_others_are_not(filled, blocks):
    before = expected(filled, range(9))
    data = np.random.default_rng(1).integers(0, 256, (len(blocks), before.shape[1]), np.uint8)
    filled.write(blocks, data)
    before[blocks] = data
    assert (expected(filled, range(9)) == before).all()


@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
def test_rows_that_lie_apart_are_copied_like_others(filled, blocks):
    size = sum(rows.shape[1] for rows in filled.rows)
    wide = np.zeros((len(blocks), size + 7), np.uint8)
    filled.read(blocks, wide[:, 3 : 3 + size])
    assert (wide[:, 3 : 3 + size] == expected(filled, blocks)).all()
    assert not wide[:, :3].any()
    assert not wide[:, 3 + size :].any()


@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
def test_layer_is_its_keys_then_its_values(filled, blocks):
    num_layers = len(filled.rows) // 2
    for place in range(num_layers):
        keys, values = filled.rows[place], filled.rows[num_layers + place]
        out = np.zeros((len(blocks), keys.shape[1] + values.shape[1]), np.uint8)
        filled.read_layer(place, blocks, out)
        assert (out == np.concatenate([keys[blocks], values[blocks]], axis=1)).all()
        before = expected(filled, range(9))
        filled.write_layer(place, blocks, 255 - out)
        assert (keys[blocks] == 255 - out[:, : keys.shape[1]]).all()
        assert (values[blocks] == 255 - out[:, keys.shape[1] :]).all()
        filled.write_layer(place, blocks, out)
        assert (expected(filled, range(9)) == before).all()


def test_data_of_the_wrong_size_is_refused_before_anything_is_written(filled):
    before = expected(filled, range(9))
    for shape in ((1, before.shape[1]), (3, before.shape[1]), (2, before.shape[1] - 1)):
        with pytest.raises(ValueError, match="bytes of each"):
            filled.write([1, 2], np.ones(shape, np.uint8)[: shape[0], : shape[1]])
    assert (expected(filled, range(9)) == before).all()


def test_views_are_the_rows_themselves(filled):
    filled.rows[0][4, 0] ^= 255
    assert b"".join(filled.view(4)) == expected(filled, [4])[0].tobytes()


def test_blocks_begin_as_zeros():
    assert not any(rows.any() for rows in HostParts(SIZES, 3).rows)


def test_copy_of_a_block_lets_other_threads_run_python():
    """Nobody is made to give up Python's lock, so the other thread moves only while a copy has given it up."""
    parts = HostParts([1 << 16] * 24, 3)
    data, count, stop = np.ones((1, 24 << 16), np.uint8), [0], threading.Event()

    def run():
        while not stop.wait(0.0001):
            count[0] += 1

    before_s = sys.getswitchinterval()
    thread = threading.Thread(target=run)
    thread.start()
    sys.setswitchinterval(1000.0)
    try:
        seen, until_s = count[0], time.monotonic() + 20.0
        while count[0] == seen and time.monotonic() < until_s:
            parts.write([1], data)
        moved = count[0] > seen
    finally:
        sys.setswitchinterval(before_s)
        stop.set()
        thread.join()
    assert moved
