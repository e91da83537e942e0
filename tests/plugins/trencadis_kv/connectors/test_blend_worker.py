"""The worker side where the backend blends, and where it does not."""

from __future__ import annotations

import logging

import pytest

from support.kv.blend_pairs import FIRST, PROMPT, BlendHands
from support.kv.fake_blender import NEARLY_ALL, BlendingCache
from trencadis.errors import BackendError
from trencadis.records import ConnectorReport
from trencadis_testing.fake_pool import FakeKVCache


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
