from __future__ import annotations

import logging
import math

import attrs
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.kv.store_parts import make_parts
from trencadis.clock import SimulatedClock
from trencadis.errors import TransferError
from trencadis.interfaces import ComponentContext, setting
from trencadis.records import TransferCause
from trencadis_kv.store.bounded import BoundedDict, RecentHashes
from trencadis_kv.store.counters import TransferCounters
from trencadis_kv.store.defaults import IdentityCodec, NoLongerThanComputing, codec_of, policy_of
from trencadis_kv.store.guarded_codec import GuardedCodec
from trencadis_kv.store.guarded_policy import GuardedPolicy
from trencadis_kv.store.messages import LoadOrder, SaveOrder, StepOrders, decode_orders, encode_orders
from trencadis_kv.testing.kv_policy import load_view


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


def test_full_dictionary_forgets_what_was_set_longest_ago():
    numbers = BoundedDict(2)
    numbers["a"], numbers["b"], numbers["a"], numbers["c"] = 1, 2, 3, 4
    assert dict(numbers) == {"a": 3, "c": 4}


def test_remembered_hashes_are_known_until_they_are_discarded():
    recent = RecentHashes(8)
    recent.add([b"a", b"b"])
    assert recent.unknown([b"a", b"x", b"b"]) == [1]
    recent.discard([b"a", b"never there"])
    assert recent.unknown([b"a", b"b"]) == [0]


def test_only_so_many_hashes_are_remembered():
    recent = RecentHashes(2)
    recent.add([b"a", b"b", b"c"])
    assert recent.unknown([b"a", b"b", b"c"]) == [0]


def test_counts_are_told_in_prometheus_text_with_the_connectors_name():
    counters = TransferCounters("shelf")
    counters.looked_up("hit")
    counters.failed(TransferCause.CORRUPT)
    counters.moved("load", num_tokens=8, num_bytes=100)
    counters.moved("load", num_tokens=4, num_bytes=60)
    counters.dropped("staging", 3)
    counters.answered(0.02)
    counters.ended(0.2)
    counters.watch(breaker_state=lambda: 2.0, staged_bytes=lambda: 7.0)
    samples = [sample for family in text_string_to_metric_families(counters.text()) for sample in family.samples]
    found = {(s.name, *sorted(v for k, v in s.labels.items() if k != "connector")): s.value for s in samples}
    assert all(sample.labels["connector"] == "shelf" for sample in samples)
    expected = {
        ("trencadis_kv_lookups_total", "hit"): 1,
        ("trencadis_kv_transfer_failures_total", "corrupt"): 1,
        ("trencadis_kv_tokens_total", "load"): 12,
        ("trencadis_kv_bytes_total", "load"): 160,
        ("trencadis_kv_dropped_saves_total", "staging"): 3,
        ("trencadis_kv_lookup_seconds_sum",): 0.02,
        ("trencadis_kv_load_seconds_count",): 1,
        ("trencadis_kv_breaker_state",): 2,
        ("trencadis_kv_staged_bytes",): 7,
    }
    assert {key: found.get(key) for key in expected} == expected


def test_setting_carries_further_metadata():
    @attrs.frozen
    class Table:
        eviction: str = setting("lru", "Which.", component="eviction")
        password: str = setting("", "Secret.", secret=True)

    eviction, password = attrs.fields(Table)
    assert eviction.metadata["component"] == "eviction"
    assert password.metadata["secret"]


@pytest.mark.parametrize(
    ("load_s", "compute_s", "wait_s"),
    [(0.1, 1.0, 0.8), (0.1, 100.0, 10.0), (0.9, 1.0, 0.0), (math.nan, math.nan, 10.0), (math.nan, 1.0, 0.8)],
)
@pytest.mark.representatives(5)
def test_load_is_awaited_no_longer_than_a_share_of_computing(load_s, compute_s, wait_s):
    view = load_view(load_s=load_s, compute_s=compute_s, timeout_s=10.0)
    assert NoLongerThanComputing().admits_load(view) == pytest.approx(wait_s)


@pytest.mark.parametrize("data", [b"", b"abc", b"abcde"])
def test_payload_of_another_length_is_corrupt(data):
    with pytest.raises(TransferError) as caught:
        IdentityCodec().decode(memoryview(data), b"", memoryview(bytearray(4)))
    assert caught.value.cause == "corrupt"


def test_engine_says_which_codec_and_policy_and_without_one_there_are_defaults():
    made = {"kv_codec": IdentityCodec(), "kv_policy": NoLongerThanComputing()}
    context = ComponentContext(clock=SimulatedClock(), seed=0, make=lambda noun, name: made[noun])
    codec = codec_of(context)
    assert isinstance(codec, GuardedCodec)
    assert bytes(codec.encode(memoryview(b"some"), b"")) == b"some"
    policy = policy_of(context)
    assert isinstance(policy, GuardedPolicy)
    assert policy.policy is made["kv_policy"]
    alone = ComponentContext(clock=SimulatedClock(), seed=0)
    assert isinstance(codec_of(alone), IdentityCodec)
    assert isinstance(policy_of(alone), NoLongerThanComputing)


def test_orders_come_out_as_they_went_in():
    orders = StepOrders(
        loads=[LoadOrder(7, [1, 2], [b"a" * 32, b"b" * 32])], saves=[SaveOrder([3], [b"\xff" * 32])], cancels=[4, 5]
    )
    message = encode_orders(orders)
    assert isinstance(message, bytes)
    assert decode_orders(message) == orders


def test_empty_message_asks_for_nothing():
    assert decode_orders(b"") == StepOrders(loads=[], saves=[], cancels=[])


@pytest.mark.parametrize("message", [b"x", b"\x93\x01\x02", msgspec.msgpack.encode(["one"])])
def test_what_is_no_message_is_refused(message):
    with pytest.raises(TransferError, match="cannot be read") as caught:
        decode_orders(message)
    assert caught.value.cause == TransferCause.CORRUPT


def test_message_of_another_version_is_refused():
    with pytest.raises(TransferError, match="version 9, this side speaks 1") as caught:
        decode_orders(msgspec.msgpack.encode([9, [], [], []]))
    assert caught.value.cause == TransferCause.INCOMPATIBLE
