"""What two versions are compared by: the same version is the same, and a difference is named."""

from __future__ import annotations

import pytest

import behaviour


def test_every_place_at_which_two_records_differ_is_named():
    before = {"tokens": {"a": "1", "b": "2"}, "flags": {"x": ""}, "plugins": "p"}
    after = {"tokens": {"a": "1", "b": "3", "c": "4"}, "flags": {}, "plugins": "p"}
    assert behaviour.differences(before, after) == [
        "flags > x: '' -> 'absent'",
        "tokens > b: '2' -> '3'",
        "tokens > c: 'absent' -> '4'",
    ]
    assert behaviour.differences(before, before) == []


def test_generated_histories_are_the_same_each_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(behaviour, "NUM_HISTORIES", 20)
    once = behaviour.history_digests()
    assert len(once) >= 20
    assert len(set(once.values())) > 5, "not only of engines that ran nothing"
    assert behaviour.history_digests() == once
