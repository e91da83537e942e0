"""Chunks are kept whole or not at all, and memory for half ones is bounded."""

from __future__ import annotations

from support.kv.blend_pairs import BLOCK, FIRST, PROMPT, A, B, BlendHands
from trencadis_kv.connectors.blend.config import BlendConfig


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
