from __future__ import annotations

import attrs
import pytest

from support.kv.store_parts import BLOCK_BYTES, hashes_of, make_pool
from trencadis.errors import TransferError
from trencadis_kv.interfaces import KVCodec
from trencadis_kv.store.defaults import IdentityCodec
from trencadis_kv.store.objects import BlockObjects

HASH, OTHER = hashes_of("one", "other")
PAYLOAD = bytes(range(BLOCK_BYTES))


class Sealing(KVCodec):
    """Turns bytes round, and appends the header that it was given."""

    flags = 131
    max_growth_bytes = 128

    def encode(self, payload, header):
        return bytes(payload)[::-1] + header

    def decode(self, data, header, out):
        if bytes(data[-128:]) != header:
            raise TransferError("another header", cause="corrupt")
        out[:] = bytes(data[:-128])[::-1]


def objects_of(codec=None, *, identity="model", namespace="default", exact_numerics=True, layout=None):
    return BlockObjects(
        layout or make_pool().layout,
        identity=identity,
        namespace=namespace,
        exact_numerics=exact_numerics,
        codec=codec or IdentityCodec(),
    )


def packed(objects, block_hash=HASH):
    return bytearray(b"".join(objects.pack(block_hash, memoryview(PAYLOAD))))


def unpacked(objects, data, block_hash=HASH):
    out = bytearray(BLOCK_BYTES)
    objects.unpack(block_hash, memoryview(data), memoryview(out))
    return bytes(out)


@pytest.mark.parametrize("codec", [IdentityCodec(), Sealing()])
def test_what_was_packed_is_unpacked_bit_for_bit(codec):
    objects = objects_of(codec)
    data = packed(objects)
    assert unpacked(objects, data) == PAYLOAD
    assert len(data) <= objects.max_bytes == 128 + BLOCK_BYTES + codec.max_growth_bytes


@pytest.mark.parametrize("position", [0, 5, 10, 40, 60, 90, 127, 128, 150, 128 + BLOCK_BYTES - 1])
def test_flipped_bit_is_noticed_wherever_it_is(position):
    objects = objects_of()
    data = packed(objects)
    data[position] ^= 4
    with pytest.raises(TransferError):
        unpacked(objects, data)


@pytest.mark.parametrize("length", [0, 1, 127, 128, 128 + BLOCK_BYTES - 1])
def test_truncated_object_is_corrupt(length):
    objects = objects_of()
    with pytest.raises(TransferError) as caught:
        unpacked(objects, packed(objects)[:length])
    assert caught.value.cause == "corrupt"


def test_another_blocks_object_is_corrupt():
    objects = objects_of()
    with pytest.raises(TransferError) as caught:
        unpacked(objects, packed(objects, OTHER))
    assert caught.value.cause == "corrupt"


@pytest.mark.parametrize(
    "other",
    [
        objects_of(identity="another model"),
        objects_of(Sealing()),
        objects_of(layout=attrs.evolve(make_pool().layout, numerics="hpu")),
        objects_of(layout=attrs.evolve(make_pool().layout, rotated=False)),
    ],
    ids=["model", "codec", "numerics", "rotated"],
)
def test_object_of_another_kind_is_incompatible(other):
    with pytest.raises(TransferError) as caught:
        unpacked(objects_of(), packed(other))
    assert caught.value.cause == "incompatible"


def test_any_numerics_shares_between_devices():
    mine = objects_of(exact_numerics=False)
    theirs = objects_of(exact_numerics=False, layout=attrs.evolve(make_pool().layout, numerics="hpu"))
    assert mine.keys([HASH]) == theirs.keys([HASH])
    assert unpacked(mine, packed(theirs)) == PAYLOAD


def test_keys_tell_namespace_model_and_block_apart():
    ones = [objects_of(), objects_of(namespace="blue"), objects_of(identity="another model")]
    keys = [key for objects in ones for key in objects.keys([HASH, OTHER])]
    assert len(set(keys)) == 6
    assert keys[0].startswith("kv1/default/")
    assert keys[0].endswith("/" + HASH.hex())
