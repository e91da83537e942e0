"""Layers are copied once, by whoever comes first, to where the bytes of a block have them."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from support.kv.store_parts import BLOCK_BYTES, make_pool, read
from trencadis.records import KVLayout, KVPart
from trencadis_kv.store.layer_copy import LayerCopy, layer_places


def part(layer, kind, head_dim=2):
    return KVPart(layer=layer, kind=kind, num_heads=1, head_dim=head_dim, dtype="float32", item_bytes=4)


def copy_of(pool, blocks):
    """Return a copy to two pieces of memory, and these."""
    out = np.zeros((len(blocks), BLOCK_BYTES), np.uint8)
    return LayerCopy(pool, blocks, [(0, out[:1]), (1, out[1:])], layer_places(pool.layout)), out


def test_places_of_keys_and_values_that_lie_apart():
    layout = KVLayout(
        parts=(part(3, "key"), part(5, "key", 4), part(3, "value"), part(5, "value", 4)),
        block_size=2,
        last_head=1,
        numerics="n",
    )
    assert layer_places(layout) == {
        3: [(slice(0, 16), slice(0, 16)), (slice(48, 64), slice(16, 32))],
        5: [(slice(16, 48), slice(0, 32)), (slice(64, 96), slice(32, 64))],
    }


def test_layers_make_up_the_blocks():
    pool = make_pool()
    copy, out = copy_of(pool, [3, 9, 5])
    for layer in (1, 0):
        copy.copy(layer)
    assert (out == read(pool, [3, 9, 5])).all()


def test_layer_is_copied_once():
    pool = make_pool()
    before = read(pool, [3, 4])
    copy, out = copy_of(pool, [3, 4])
    copy.copy(0)
    pool.write_blocks([3, 4], 255 - before)
    copy.run(None)
    half = BLOCK_BYTES // 2
    assert (out[:, :half] == before[:, :half]).all()
    assert (out[:, half:] == 255 - before[:, half:]).all()


def test_unknown_layer_is_nothing_to_copy():
    copy, out = copy_of(make_pool(), [3, 4])
    copy.copy(7)
    assert not out.any()
    assert copy.error is None


def test_nothing_is_touched_when_it_was_given_up():
    copy, out = copy_of(make_pool(), [3, 4])
    copy.give_up()
    copy.run(None)
    assert not out.any()


def test_pool_that_raises_ends_the_copy():
    pool = make_pool()
    read_layer, asked = pool.read_layer, []

    def raises_once(layer, blocks, out):
        asked.append(layer)
        if len(asked) == 1:
            raise OSError("lost")
        read_layer(layer, blocks, out)

    pool.read_layer = raises_once
    copy, _ = copy_of(pool, [3, 4])
    copy.run(None)
    copy.copy(1)
    assert asked == [0]
    assert str(copy.error) == "lost"


@pytest.mark.parametrize("waits_for", ["copy", "give_up"])
def test_who_comes_second_waits_for_the_first(waits_for):
    pool = make_pool()
    read_layer, is_reading, may_read = pool.read_layer, threading.Event(), threading.Event()

    def slow(layer, blocks, out):
        is_reading.set()
        assert may_read.wait(60.0)
        read_layer(layer, blocks, out)

    pool.read_layer = slow
    copy, out = copy_of(pool, [3, 4])
    first = threading.Thread(target=copy.copy, args=(0,))
    first.start()
    assert is_reading.wait(60.0)
    seen = []
    call = (lambda: copy.copy(0)) if waits_for == "copy" else copy.give_up
    second = threading.Thread(target=lambda: (call(), seen.append(bool(out[:, : BLOCK_BYTES // 2].any()))))
    second.start()
    assert seen == []
    may_read.set()
    first.join(60.0)
    second.join(60.0)
    assert seen == [True]
