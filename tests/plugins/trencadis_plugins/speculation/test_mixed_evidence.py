from __future__ import annotations

import pytest

from trencadis_plugins.speculation import mixed_evidence
from trencadis_plugins.speculation.mixed_evidence import Evidence, Record


def evidence(**options):
    return Evidence(2, **{"explore_every": 0, "prior_weight": 4.0, "memory": 32} | options)


def test_mean_lies_between_what_was_seen_and_the_prior():
    record = Record.empty(1)
    assert record.mean(0, 1.0, 4.0) == 1.0
    for _ in range(4):
        record.note(0, 3.0, memory=1e9)
    assert record.mean(0, 1.0, 4.0) == pytest.approx(2.0)
    assert record.mean(0, 1.0, 0.0) == pytest.approx(3.0)


def test_old_steps_count_a_third_after_the_memory():
    record = Record.empty(1)
    record.note(0, 1.0, memory=100)
    before = record.weights[0]
    for _ in range(100):
        record.note(0, 0.0, memory=100)
    assert record.totals[0] / before == pytest.approx(0.366, abs=0.001)


def test_member_that_accepts_more_is_chosen_and_the_first_of_equals():
    known, record = evidence(), Record.empty(2)
    assert known.choose(record, "t") == 0
    for _ in range(10):
        known.note(record, "t", 0, 0)
        known.note(record, "t", 1, 2)
    assert known.choose(record, "t") == 1


def test_new_request_begins_with_what_its_tenant_has_shown_and_nobody_elses():
    known, first = evidence(), Record.empty(2)
    for _ in range(20):
        known.note(first, "blue", 0, 0)
        known.note(first, "blue", 1, 3)
    assert known.choose(Record.empty(2), "blue") == 1
    assert known.choose(Record.empty(2), "green") == 0


def test_a_request_may_differ_from_its_tenant():
    known, of_tenant, own = evidence(), Record.empty(2), Record.empty(2)
    for _ in range(20):
        known.note(of_tenant, "t", 1, 3)
    for _ in range(20):
        known.note(own, "t", 1, 0)
        known.note(own, "t", 0, 2)
    assert known.choose(own, "t") == 0


def test_the_one_asked_least_is_tried_as_rarely_as_said():
    known, record = evidence(explore_every=8), Record.empty(2)
    chosen = []
    for _ in range(32):
        chosen.append(known.choose(record, "t"))
        known.note(record, "t", chosen[-1], 2 if chosen[-1] == 0 else 0)
    assert [i for i, member in enumerate(chosen) if member == 1] == [7, 15, 23, 31]


def test_memory_of_tenants_is_bounded(monkeypatch):
    monkeypatch.setattr(mixed_evidence, "_MAX_TENANTS", 3)
    known = evidence()
    for i in range(10):
        known.choose(Record.empty(2), i)
    assert list(known._tenants) == [7, 8, 9]
