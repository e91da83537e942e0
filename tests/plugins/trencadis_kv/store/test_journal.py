"""What a rank does to shared state, and how the engine repeats it."""

from __future__ import annotations

import msgspec
import pytest

from trencadis.errors import TransferError
from trencadis.records import TransferCause
from trencadis_kv.store.bounded import RecentHashes
from trencadis_kv.store.counters import TransferCounters
from trencadis_kv.store.journal import IndexStore, Journal, KeyIndex, repeat


def test_calls_are_repeated_in_order_and_once():
    journal, counters, recent, index = Journal(), TransferCounters("shelf"), RecentHashes(9), KeyIndex()
    recent.add([b"a", b"b"])
    journal.of("counters").failed(TransferCause.CORRUPT)
    journal.of("counters").moved("load", num_tokens=8, num_bytes=100)
    journal.of("recent").discard([b"b"])
    for call in ("add", "remove", "add"):
        getattr(journal.of("index"), call)("kv1/rank0/a")
    journal.of("index").add("kv1/rank1/a")
    (message,) = journal.take()
    assert journal.take() == ()
    state = {"counters": counters, "recent": recent, "index": index}
    repeat(message, state, is_first=True)
    assert counters.value("transfer_failures_total", cause="corrupt") == 1
    assert counters.value("tokens_total", direction="load") == 8
    assert recent.unknown([b"a", b"b"]) == [1]
    assert IndexStore(index).contains(["kv1/rank0/a", "kv1/rank1/a", "kv1/rank2/a"]) == 2
    index.clear("kv1/rank0/")
    assert IndexStore(index).contains(["kv1/rank0/a"]) == 0


def test_tokens_and_durations_count_on_the_first_rank_and_bytes_on_each():
    counters = TransferCounters("shelf")
    for rank in range(3):
        journal = Journal()
        journal.of("counters").moved("save", num_tokens=4, num_bytes=10)
        journal.of("counters").ended(0.5)
        repeat(*journal.take(), {"counters": counters}, is_first=rank == 0)
    assert counters.value("tokens_total", direction="save") == 4
    assert counters.value("bytes_total", direction="save") == 30
    assert counters.value("load_seconds_count") == 1


def test_a_long_list_of_calls_comes_in_several_messages():
    journal, index = Journal(), KeyIndex()
    for number in range(10_000):
        journal.of("index").add(str(number))
    messages = [*journal.take(), *journal.take(), *journal.take()]
    assert len(messages) == 2
    for message in messages:
        repeat(message, {"index": index}, is_first=True)
    assert "9999" in index


def test_only_what_is_known_is_recorded_and_repeated():
    with pytest.raises(AttributeError, match=r"counters\.text is not known"):
        Journal().of("counters").text()
    for message in (
        b"nonsense",
        msgspec.msgpack.encode([("index", "__init__", [], {})]),
        msgspec.msgpack.encode([("x", "y", [], {})]),
    ):
        with pytest.raises(TransferError):
            repeat(message, {"index": KeyIndex()}, is_first=True)


def test_a_breaker_that_is_elsewhere_lets_everything_through():
    assert Journal().of("breaker").allows
