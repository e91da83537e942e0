from __future__ import annotations

import logging

from support.kv.store_parts import hashes_of, make_parts, make_pool
from trencadis.errors import TransferError


def test_failures_are_counted_by_cause_and_break():
    parts = make_parts(failure_limit=2)
    for _ in range(2):
        parts.failed(TransferError("gone", cause="unreachable"), "load")
    assert parts.counters.value("transfer_failures_total", cause="unreachable") == 2
    assert not parts.breaker.allows


def test_only_the_first_failure_of_a_cause_is_a_warning(caplog):
    parts = make_parts()
    with caplog.at_level(logging.DEBUG, "trencadis.kv"):
        for cause in ("evicted", "evicted", "full"):
            parts.failed(TransferError("it happened", cause=cause), "load")
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.DEBUG, logging.WARNING]
    assert "KV load of shelf failed (evicted): it happened" in caplog.text


def test_objects_follow_the_settings():
    layout, block_hash = make_pool().layout, hashes_of(1)
    keys = {make_parts(**some).objects(layout).keys(block_hash)[0] for some in ({}, {"numerics": "any"})}
    keys.add(make_parts(namespace="blue").objects(layout).keys(block_hash)[0])
    assert len(keys) == 3
