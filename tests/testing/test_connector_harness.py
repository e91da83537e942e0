from __future__ import annotations

import pytest

from trencadis.interfaces import Lookup
from trencadis_testing.connector_harness import ConnectorHarness, hashes_of, request_of
from trencadis_testing.doubles import LoopConnector
from trencadis_testing.fake_pool import FakeKVCache


def desk_of(**options):
    pair = LoopConnector(**options).pair()
    return ConnectorHarness(
        pair, block_size=4, cache=lambda arrays: FakeKVCache(arrays, block_size=4), settle=lambda: None
    )


def test_hashes_differ_and_are_the_same_for_the_same_block():
    assert hashes_of([1, 2, 1])[0] == hashes_of([1])[0] != hashes_of([2])[0]


def test_prompt_is_one_token_longer_than_its_full_blocks():
    assert len(request_of(hashes_of(range(3))).prompt_token_ids) == 13


def test_content_that_was_saved_is_loaded_into_other_blocks():
    harness, hashes = desk_of(), hashes_of(range(2))
    saved = harness.save([3, 4], hashes)
    assert harness.contents([3, 4]) != saved
    found = harness.lookup(hashes)
    assert found.num_tokens == 8
    assert harness.load(found.transfer_id, [7, 8], hashes) == ""
    assert harness.contents([7, 8]) == saved


def test_saving_by_layer_overwrites_the_cache_as_well():
    harness, hashes = desk_of(), hashes_of(range(2))
    saved = harness.save_by_layer([3, 4], hashes)
    assert all(now != then for now, then in zip(harness.contents([3, 4]), saved, strict=True))
    assert harness.load(harness.lookup(hashes).transfer_id, [7, 8], hashes) == ""
    assert harness.contents([7, 8]) == saved


def test_failed_load_tells_its_cause_and_its_valid_tokens():
    harness, hashes = desk_of(fail=lambda transfer_id: 4), hashes_of(range(2))
    harness.save([3, 4], hashes)
    assert harness.load(harness.lookup(hashes).transfer_id, [7, 8], hashes) == "injected"
    assert harness.num_valid_tokens == 4


def test_pending_lookup_is_asked_again_until_it_answers():
    harness, hashes = desk_of(pending=3), hashes_of(range(1))
    harness.save([3], hashes)
    assert harness.lookup(hashes).num_tokens == 4


def test_lookup_or_load_that_never_answers_is_an_error():
    harness = desk_of()
    harness.pair.worker.begin_step = lambda message: None
    with pytest.raises(AssertionError, match="neither arrives nor fails"):
        harness.load(5, [1], hashes_of([1]))
    harness.pair.scheduler.lookup = lambda *_, **__: Lookup(pending=True)
    with pytest.raises(AssertionError, match="answers pending"):
        harness.lookup(hashes_of([1]))


def test_until_is_false_if_no_report_is_as_asked_for():
    assert not desk_of().until(lambda report: bool(report.loaded))
