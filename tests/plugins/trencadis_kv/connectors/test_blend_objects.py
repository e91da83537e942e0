"""A chunk in a store is proven to be the one that was asked for."""

from __future__ import annotations

import numpy as np
import pytest

from trencadis.errors import TransferError
from trencadis.records import KVLayout, KVPart, TransferCause
from trencadis_kv.connectors.blend.chunk_saves import ChunkObjects
from trencadis_kv.store.format import HEADER_BYTES, ROTATED, parse_header
from trencadis_kv.store.identity import key_prefix

LAYOUT = KVLayout(
    parts=tuple(
        KVPart(layer=0, kind=kind, num_heads=1, head_dim=2, dtype="float32", item_bytes=4) for kind in ("key", "value")
    ),
    block_size=4,
    last_head=1,
    numerics="test",
)
OBJECTS = ChunkObjects(LAYOUT, identity="model", token_bytes=16)
KEY, TOKENS = b"k" * 32, np.arange(5 * 16, dtype=np.uint8).reshape(5, 16)


def packed(key=KEY, objects=OBJECTS):
    return np.frombuffer(b"".join(objects.pack(key, TOKENS, position=7)), np.uint8).copy()


def test_tokens_come_back():
    data = packed()
    assert len(data) == OBJECTS.num_bytes(5) == HEADER_BYTES + 80
    assert (OBJECTS.unpack(KEY, data, num_tokens=5) == TOKENS).all()


def test_header_says_that_keys_are_not_rotated():
    header = parse_header(packed().tobytes())
    assert not header.flags & ROTATED
    assert (header.num_tokens, header.first_token) == (5, 7)


def test_key_is_never_that_of_a_block():
    assert OBJECTS.key(KEY).startswith("kvb1/")
    assert not key_prefix("default", compat=b"c" * 16, layout=LAYOUT).startswith("kvb1/")


@pytest.mark.parametrize("at", [0, 60, 100, HEADER_BYTES, -1])
def test_any_changed_byte_is_noticed(at):
    data = packed()
    data[at] ^= 1
    with pytest.raises(TransferError):
        OBJECTS.unpack(KEY, data, num_tokens=5)


def test_another_chunk_length_or_model_is_refused():
    for data, objects, num_tokens, cause in (
        (packed(b"o" * 32), OBJECTS, 5, TransferCause.CORRUPT),
        (packed(), OBJECTS, 4, TransferCause.CORRUPT),
        (packed()[:-1], OBJECTS, 5, TransferCause.CORRUPT),
        (packed(), ChunkObjects(LAYOUT, identity="other", token_bytes=16), 5, TransferCause.INCOMPATIBLE),
    ):
        with pytest.raises(TransferError) as caught:
            objects.unpack(KEY, data, num_tokens=num_tokens)
        assert caught.value.cause == cause


def test_block_size_of_the_cache_does_not_matter():
    """A chunk has no blocks: two engines with other block sizes mean the same by it."""
    import attrs

    other = ChunkObjects(attrs.evolve(LAYOUT, block_size=16), identity="model", token_bytes=16)
    assert other.key(KEY) == OBJECTS.key(KEY)
