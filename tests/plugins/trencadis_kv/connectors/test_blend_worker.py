"""The worker side where the backend blends, and where it does not."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from support.kv.blend_pairs import FIRST, PROMPT, A, B, BlendHands
from support.kv.fake_blender import NEARLY_ALL, BlendingCache
from trencadis.errors import BackendError
from trencadis.records import ConnectorReport
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


def test_part_of_a_chunk_is_that_part(hands):
    """The fake compares the tokens that it is given with those of the prompt."""
    begin(hands, (*A[:9], *B, 5))
    hands.step()
    assert hands.step().loaded


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


def test_store_that_raises_fails_as_raised(hands, monkeypatch):
    def raises(*_):
        raise OSError("gone")

    monkeypatch.setattr(memory(hands), "get", raises)
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


def test_blocks_are_filled_and_reported_once():
    hands = BlendHands()
    hands.learn(FIRST)
    found = hands.lookup(PROMPT, ratio=NEARLY_ALL)
    blocks = list(range(20, 20 + found.num_tokens // 4))
    hands.pair.scheduler.on_allocated(found.transfer_id, blocks=blocks, block_hashes=[])
    reports = [hands.step() for _ in range(3)]
    assert [report.loaded for report in reports] == [(), (found.transfer_id,), ()]
    filled = [array.copy() for array in hands.arrays]
    hands.compute(PROMPT[: found.num_tokens], blocks)
    assert all((one == other).all() for one, other in zip(filled, hands.arrays, strict=True))
    hands.close()


def test_closed_worker_lets_go_of_the_backend_and_does_nothing():
    hands = BlendHands()
    hands.learn(FIRST)
    found = hands.lookup(PROMPT, ratio=NEARLY_ALL)
    hands.pair.scheduler.on_allocated(found.transfer_id, blocks=list(range(20, 32)), block_hashes=[])
    hands.close()
    hands.close()
    before = [array.copy() for array in hands.arrays]
    assert hands.step() == ConnectorReport()
    assert all((one == other).all() for one, other in zip(before, hands.arrays, strict=True))
