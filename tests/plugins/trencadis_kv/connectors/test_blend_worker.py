"""The worker side where the backend blends, and where it does not."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from support.kv.blend_pairs import BLOCK, FIRST, PROMPT, A, B, BlendHands
from support.kv.fake_blender import BlendingCache
from trencadis.errors import BackendError, TransferError
from trencadis.records import ConnectorReport, KVLayout, KVPart, TransferCause
from trencadis_kv.connectors.blend.chunk_saves import ChunkObjects
from trencadis_kv.connectors.blend.config import BlendConfig
from trencadis_kv.store.format import HEADER_BYTES, ROTATED, parse_header
from trencadis_kv.store.identity import key_prefix
from trencadis_testing.fake_pool import FakeKVCache


@pytest.fixture
def hands():
    made = BlendHands()
    made.learn(FIRST)
    yield made
    made.close()


def begin(hands, prompt=PROMPT, first=20, ratio=0.2):
    found = hands.lookup(prompt, ratio=ratio)
    blocks = list(range(first, first + found.num_tokens // 4))
    hands.pair.scheduler.on_allocated(found.transfer_id, blocks=blocks, block_hashes=[])
    return found.transfer_id


def memory(hands):
    return hands.shared.make_store()._memory


def causes(report):
    return [failed.cause for failed in report.failed]


def test_first_tokens_of_chunks_and_nothing_else_are_forced(hands):
    begin(hands)
    hands.step(), hands.step()
    (order,) = hands.pool.blender().orders
    forced = [i for i, must in enumerate(order.forced) if must]
    assert forced == [*range(4), *range(16, 20), *range(32, 36)]
    assert (order.ratio, order.num_exact, len(order.chunks)) == (0.2, 0, 3)


def test_chunk_that_is_gone_fails_as_evicted(hands):
    memory(hands).delete(list(memory(hands)._objects)[:1])
    begin(hands)
    hands.step()
    assert causes(hands.step()) == ["evicted"]
    assert hands.pool.blender().orders == []


def test_broken_chunk_fails_as_corrupt_and_is_deleted(hands):
    store = memory(hands)
    for one in store._objects.values():
        one.data = np.frombuffer(bytes(one.data), np.uint8).copy()
        one.data[-1] ^= 1
    begin(hands)
    hands.step()
    assert causes(hands.step()) == ["corrupt"]
    assert len(store) == 2, "the first that was read is gone"
    assert hands.pool.blender().orders == []


def test_blending_that_raises_fails_as_raised(hands):
    hands.pool.blender().raises = RuntimeError("no")
    begin(hands)
    hands.step()
    assert causes(hands.step()) == ["raised"]


def test_work_is_done_a_part_at_a_time_when_it_takes_longer_than_the_budget(hands):
    blender = hands.pool.blender()
    blender.num_parts, blender.tick = 6, lambda: hands.clock.advance(0.05)
    transfer_id = begin(hands)
    num_steps = 0
    while transfer_id not in hands.step().loaded:
        num_steps += 1
        assert num_steps < 20
    assert num_steps >= 5


def test_two_at_once_are_read_and_the_others_wait_their_turn(hands):
    transfer_ids = [begin(hands, first=20 + i) for i in range(5)]
    loaded = [hands.step().loaded for _ in range(5)]
    assert sum(loaded, ()) == tuple(transfer_ids)
    assert max(map(len, loaded)) <= 2


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_cancelled_at_any_time_it_is_released_once_and_does_nothing_more(hands, num_steps):
    blender = hands.pool.blender()
    blender.num_parts, blender.tick = 9, lambda: hands.clock.advance(0.05)
    transfer_id = begin(hands)
    for _ in range(num_steps):
        hands.step()
    hands.pair.scheduler.on_cancelled(transfer_id)
    before = [array.copy() for array in hands.arrays]
    reports = [hands.step() for _ in range(12)]
    assert [report.released for report in reports if report.released] == [(transfer_id,)]
    assert not any(report.loaded or report.failed for report in reports)
    assert all((one == other).all() for one, other in zip(before, hands.arrays, strict=True))


def test_time_that_blending_took_corrects_the_prediction(hands):
    hands.pair.scheduler.on_step(num_tokens=1000, device_s=1.0)
    hands.pool.blender().tick = lambda: hands.clock.advance(1.0)
    before = hands.pair.scheduler._share.of(0.5)
    transfer_id = begin(hands)
    while transfer_id not in hands.step().loaded:
        pass
    assert hands.pair.scheduler._share.of(0.5) > 2 * before


class Unable(BlendingCache):
    def blender(self):
        raise BackendError("GemmaForCausalLM has layers with a sliding window.")


@pytest.mark.parametrize(("kind", "reason"), [(FakeKVCache, "this backend cannot blend"), (Unable, "sliding window")])
def test_backend_that_cannot_blend_costs_one_line_and_every_lookup_misses(kind, reason, caplog):
    with caplog.at_level(logging.WARNING):
        plain = BlendHands()
        hands = BlendHands(pool=kind(plain.arrays, block_size=4))
        hands.learn(FIRST)
        assert hands.lookup(PROMPT, ratio=0.2).num_tokens == 0
    assert [record.message for record in caplog.records if reason in record.message] == [
        record.message for record in caplog.records
    ]
    assert len(caplog.records) == 1
    assert hands.step() == ConnectorReport()
    hands.close()
    plain.close()


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
