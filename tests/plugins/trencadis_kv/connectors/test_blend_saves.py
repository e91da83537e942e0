"""Chunks are kept whole or not at all, and memory for half ones is bounded."""

from __future__ import annotations

import numpy as np
import pytest

from support.kv.blend_pairs import BLOCK, FIRST, PROMPT, A, B, BlendHands
from trencadis.errors import TransferError
from trencadis.records import KVLayout, KVPart, TransferCause
from trencadis_kv.connectors.blend.chunk_saves import ChunkObjects
from trencadis_kv.connectors.blend.config import BlendConfig
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


def offer(hands, prompt, blocks, places):
    hashes = hands.hashes(prompt)
    hands.pair.scheduler.on_computed(blocks=[blocks[i] for i in places], block_hashes=[hashes[i] for i in places])


def test_chunk_that_is_computed_over_many_steps_is_kept_once_it_is_whole():
    """Blocks are copied when they are offered: what they hold later does not matter."""
    hands = BlendHands()
    hands.lookup(FIRST)
    blocks = list(range(30, 43))
    for place in (1, 0, 2, 3):
        hands.compute(FIRST, blocks)
        offer(hands, FIRST, blocks, [place])
        assert not hands.shared.kept
        hands.step()
        hands.arrays[1][:] = 0
    hands.lookup((1,))
    assert hands.lookup((7, 7, *A, 5), ratio=0.2).num_tokens == 16
    hands.close()


def test_half_a_chunk_is_not_found():
    hands = BlendHands()
    hands.lookup(FIRST)
    hands.compute(FIRST, list(range(13)))
    offer(hands, FIRST, list(range(13)), [0, 1, 2])
    hands.step()
    hands.lookup((1,))
    assert hands.lookup((7, 7, *A, 5), ratio=0.2).num_tokens == 0
    hands.close()


def test_oldest_half_chunk_gives_way_when_memory_is_full():
    room = 2 * 4 * BLOCK * 24  # two chunks of four blocks of 24 bytes a token
    hands = BlendHands(BlendConfig(min_chunk_tokens=8, chunk_tokens=16, staging_bytes=room))
    hands.lookup(FIRST)
    hands.compute(FIRST, list(range(13)))
    for place in (0, 4, 8):
        offer(hands, FIRST, list(range(13)), [place])
        hands.step()
    assert hands.shared.counters.value("dropped_saves_total", reason="staging") == 1
    offer(hands, FIRST, list(range(13)), [1, 2, 3, 5, 6, 7, 9, 10, 11])
    hands.step()
    hands.lookup((1,))
    assert hands.lookup((*B, 5), ratio=0.2).num_tokens > 0
    assert hands.lookup((*A, 5), ratio=0.2).num_tokens == 0
    hands.close()


def test_chunk_without_any_room_is_dropped_and_can_be_wanted_again():
    hands = BlendHands(BlendConfig(min_chunk_tokens=8, chunk_tokens=16, staging_bytes=100))
    hands.learn(FIRST)
    assert hands.lookup(PROMPT, ratio=0.2).num_tokens == 0
    assert hands.shared.counters.value("dropped_saves_total", reason="staging") == 3
    hands.close()


def test_chunk_that_the_memory_refuses_is_not_found_and_not_awaited():
    hands = BlendHands(BlendConfig(min_chunk_tokens=8, chunk_tokens=16, capacity_bytes=100))
    hands.learn(FIRST)
    assert hands.lookup(PROMPT, ratio=0.2).num_tokens == 0
    assert hands.shared.counters.value("tokens_total", direction="save") == 0
    hands.close()


def test_blender_that_raises_costs_the_chunk_alone(caplog):
    hands = BlendHands()

    def raises(*_, **__):
        raise RuntimeError("no")

    hands.pool.blender().pack = raises
    hands.learn(FIRST)
    assert hands.lookup(PROMPT, ratio=0.2).num_tokens == 0
    assert hands.shared.counters.value("transfer_failures_total", cause="raised") == 3
    assert "RuntimeError: no" in caplog.text
    hands.close()
