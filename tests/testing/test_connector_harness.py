from __future__ import annotations

import pytest

from trencadis.interfaces import Lookup
from trencadis_testing.connector_harness import ConnectorHarness, hashes_of
from trencadis_testing.doubles import LoopConnector
from trencadis_testing.fake_pool import FakeKVCache


def desk_of(**options):
    pair = LoopConnector(**options).pair()
    return ConnectorHarness(
        pair, block_size=4, cache=lambda arrays: FakeKVCache(arrays, block_size=4), settle=lambda: None
    )


def test_failed_load_tells_its_cause_and_its_valid_tokens():
    harness, hashes = desk_of(fail=lambda transfer_id: 4), hashes_of(range(2))
    harness.save([3, 4], hashes)
    assert harness.load(harness.lookup(hashes).transfer_id, [7, 8], hashes) == "injected"
    assert harness.num_valid_tokens == 4


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
