"""What is found, what is declined, and what is ordered."""

from __future__ import annotations

import logging
import math

import pytest

from support.kv.blend_pairs import BLOCK, FIRST, PROMPT, A, B, BlendHands, C, document
from trencadis.records import ConnectorReport, FailedLoad
from trencadis_kv.connectors.blend import scheduler as blend_scheduler
from trencadis_kv.connectors.blend.config import BlendConfig
from trencadis_kv.connectors.blend.messages import decode_orders
from trencadis_kv.connectors.blend.scheduler import BlendShare
from trencadis_kv.interfaces import KVPolicy


def test_all_tokens_go_through_the_first_layers_and_a_share_through_the_rest():
    share = BlendShare(num_layers=14)
    assert share.of(1.0) == pytest.approx(1.0)
    assert share.of(0.0) == pytest.approx(0.1)
    assert share.of(0.5) == pytest.approx(0.55)
    assert BlendShare(num_layers=1).of(0.0) == pytest.approx(1.0)


def test_prediction_comes_to_what_it_takes():
    share = BlendShare(num_layers=14)
    for _ in range(40):
        share.took(predicted_s=2.0 * share.of(0.5), seconds=2.0 * 0.8)
    assert share.of(0.5) == pytest.approx(0.8, rel=1e-3)


@pytest.mark.parametrize(("predicted", "seconds"), [(math.nan, 1.0), (0.0, 1.0), (1.0, 0.0), (math.inf, 1.0)])
def test_what_says_nothing_is_ignored(predicted, seconds):
    share = BlendShare(num_layers=14)
    share.took(predicted_s=predicted, seconds=seconds)
    assert share.of(1.0) == pytest.approx(1.0)


def test_one_odd_measurement_does_not_take_it_far():
    share = BlendShare(num_layers=14)
    share.took(predicted_s=1e-9, seconds=1e9)
    assert share.of(1.0) <= 10.0


class Careful(KVPolicy):
    """No longer than computing."""

    def admits_load(self, view):
        return view.timeout_s if not view.load_s >= view.compute_s else 0.0


LONG = tuple(i % 96 + 1 for i in range(20_000))


@pytest.fixture
def hands():
    made = BlendHands()
    yield made
    made.close()


def test_hit_is_approximate_and_ends_at_a_full_block(hands):
    hands.learn(FIRST)
    found = hands.lookup((*C, *A, *B[:14], 96, 96, 96, 96), ratio=0.2)
    assert found.approximate
    assert found.num_tokens == 44
    assert hands.lookup(PROMPT, ratio=0.2).transfer_id != found.transfer_id


def test_fill_names_all_blocks_and_where_chunks_lie(hands):
    hands.learn(FIRST)
    prompt = (*A, 50, 50, *C, *B, 5)
    found = hands.lookup(prompt, ratio=0.3, local=16)
    hands.pair.scheduler.take_message()
    blocks = [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 10, 11][: found.num_tokens // BLOCK]
    hands.pair.scheduler.on_allocated(found.transfer_id, blocks=blocks, block_hashes=[])
    (assembly,) = decode_orders(hands.pair.scheduler.take_message()).assemblies
    assert (assembly.num_exact, assembly.blocks, assembly.ratio) == (16, blocks, 0.3)
    assert [(place.position, place.num_tokens) for place in assembly.chunks] == [(18, 16), (34, 14)]
    assert len(assembly.token_ids) == 4 * found.num_tokens == 4 * 48


def test_long_prompt_is_pending_until_it_was_worked_through(hands):
    """With the answer that a short one gets at once; the local hit that counts is the one at the end."""
    hands.learn(FIRST)
    prompt = (*PROMPT[:48], *LONG)
    answers = [hands.lookup(prompt, ratio=0.2, params=None)]
    while answers[-1].pending:
        answers.append(hands.lookup(prompt, ratio=0.2, local=16))
    assert len(answers) > 3
    assert answers[-1].num_tokens == 48
    plan = hands.pair.scheduler._plans[answers[-1].transfer_id]
    assert (plan.num_exact, [place.position for place in plan.part.places]) == (16, [16, 32])
    assert hands.shared.counters.value("lookups_total", result="hit") == 1


def test_request_that_is_aborted_while_its_lookup_is_pending_leaves_nothing(hands):
    scheduler = hands.pair.scheduler
    for told in (scheduler.on_abandoned, lambda request: scheduler.on_finished(request, blocks=[])):
        assert hands.lookup(LONG, ratio=0.2).pending
        assert len(scheduler._lookups) == 1
        told(hands.request(LONG))
        assert len(scheduler._lookups) == 0
    assert not scheduler._plans
    assert not scheduler._filling


def test_request_that_does_not_ask_is_not_held_up_and_learnt_from_meanwhile(hands):
    prompt = document(4, 20_000)
    assert not hands.lookup(prompt).pending
    wanted, counts = hands.pair.scheduler._wanted, []
    while len(hands.pair.scheduler._lookups):
        counts.append(len(wanted))
        hands.pair.scheduler.take_message()
        counts.append(len(wanted))
        hands.pair.scheduler.on_step(num_tokens=2048, device_s=1.0)
    assert counts == sorted(set(counts)), "each call notes more"
    assert len(wanted) == 20_000 // 16


def test_fills_that_are_too_many_for_a_message_go_with_the_next(hands, monkeypatch):
    monkeypatch.setattr(blend_scheduler, "_MESSAGE_PARTS", 30)
    hands.learn(FIRST)
    transfer_ids = []
    for name in "abcde":
        found = hands.lookup(PROMPT, ratio=0.2, name=name)
        transfer_ids.append(found.transfer_id)
        hands.pair.scheduler.on_allocated(found.transfer_id, blocks=list(range(12)), block_hashes=[])
    hands.pair.scheduler.on_cancelled(transfer_ids[3])
    messages = [decode_orders(hands.pair.scheduler.take_message()) for _ in range(4)]
    assert [[assembly.transfer_id for assembly in message.assemblies] for message in messages] == [
        transfer_ids[:2],
        [transfer_ids[2], transfer_ids[4]],
        [],
        [],
    ]
    assert messages[0].cancels == [transfer_ids[3]]
    monkeypatch.setattr(blend_scheduler, "_MESSAGE_PARTS", 1)
    found = hands.lookup(PROMPT, ratio=0.2)
    hands.pair.scheduler.on_allocated(found.transfer_id, blocks=list(range(12)), block_hashes=[])
    assert len(decode_orders(hands.pair.scheduler.take_message()).assemblies) == 1, "one that has more goes alone"


def test_news_are_taken_a_part_at_a_call(hands, monkeypatch):
    monkeypatch.setattr(blend_scheduler, "_MAX_NEWS", 2 * (blend_scheduler._CHUNK_NEWS + 4))
    scheduler = hands.pair.scheduler
    hands.lookup(document(5, 96 + 1))
    numbers = list(scheduler._wanted._by_number)
    hands.shared.kept.extend(numbers[:3])
    hands.shared.lost.extend(numbers[3:])
    left = []
    while len(scheduler._wanted):
        scheduler.on_report(ConnectorReport())
        left.append(len(scheduler._wanted))
    assert left == [4, 2, 0]
    assert len(scheduler._index) == 3


def test_chunks_are_forgotten_a_part_at_a_call(hands, monkeypatch):
    monkeypatch.setattr(blend_scheduler, "_MAX_FORGOTTEN", 2)
    hands.learn(FIRST)
    found = hands.lookup(PROMPT, ratio=0.2)
    scheduler = hands.pair.scheduler
    scheduler.on_allocated(found.transfer_id, blocks=list(range(12)), block_hashes=[])
    failed = FailedLoad(transfer_id=found.transfer_id, num_valid_tokens=0, cause="evicted")
    scheduler.on_report(ConnectorReport(failed=(failed,)))
    assert len(scheduler._index) == 1
    scheduler.on_report(ConnectorReport())
    assert len(scheduler._index) == 0
    assert not scheduler._doomed


def test_prompt_with_little_of_it_found_is_computed(hands):
    hands.learn((*A, 9))
    assert hands.lookup((*document(8, 40), *A, 5), ratio=0.2).num_tokens == 0
    assert hands.lookup((*document(8, 12), *A, 5), ratio=0.2).num_tokens == 28
    assert hands.shared.counters.value("lookups_total", result="miss") == 1


def test_prompt_that_is_computed_as_quickly_is_declined():
    hands = BlendHands(policy=Careful)
    hands.learn(FIRST)
    assert hands.lookup(PROMPT, ratio=0.1).num_tokens > 0, "nothing was measured yet"
    hands.pair.scheduler.on_step(num_tokens=1000, device_s=1.0)
    assert hands.lookup(PROMPT, ratio=0.999).num_tokens == 0
    assert hands.shared.counters.value("lookups_total", result="declined") == 1
    hands.close()


def test_wrong_ratio_is_computed_and_said(hands, caplog):
    hands.learn(FIRST)
    with caplog.at_level(logging.INFO):
        assert hands.lookup(PROMPT, params={"blend": True, "blend_ratio": 7}).num_tokens == 0
    assert "blend_ratio" in caplog.text


def test_chunks_that_cannot_be_read_are_forgotten(hands):
    hands.learn(FIRST)
    for cause, is_known in (("raised", True), ("evicted", False)):
        found = hands.lookup(PROMPT, ratio=0.2)
        hands.pair.scheduler.on_allocated(found.transfer_id, blocks=list(range(12)), block_hashes=[])
        failed = FailedLoad(transfer_id=found.transfer_id, num_valid_tokens=0, cause=cause)
        hands.pair.scheduler.on_report(ConnectorReport(failed=(failed,)))
        assert bool(hands.lookup(PROMPT, ratio=0.2).num_tokens) is is_known


def test_only_requests_that_ask_are_learnt_from_if_so_configured():
    hands = BlendHands(BlendConfig(min_chunk_tokens=8, chunk_tokens=16, saves="asked"))
    hands.learn(FIRST)
    assert hands.lookup(PROMPT, ratio=0.2).num_tokens == 0
    hands.learn(FIRST, ratio=0.2)
    assert hands.lookup(PROMPT, ratio=0.2).num_tokens > 0
    hands.close()


def test_separator_says_where_chunks_begin():
    """With it, a document that stood behind seven tokens is one chunk, and is found whole."""
    config = BlendConfig(min_chunk_tokens=8, chunk_tokens=16, separator="###")
    hands = BlendHands(config, separator=(95, 96))
    hands.learn((1, 2, 3, 4, 5, 95, 96, *A[:14], 95, 96, *B, 9))
    found = hands.lookup((*A[:14], 95, 96, 7), ratio=0.2)
    assert found.num_tokens == 16
    hands.close()
