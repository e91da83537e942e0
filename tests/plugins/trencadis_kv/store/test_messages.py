from __future__ import annotations

import msgspec
import pytest

from trencadis.errors import TransferError
from trencadis.records import TransferCause
from trencadis_kv.store.messages import LoadOrder, SaveOrder, StepOrders, decode_orders, encode_orders


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
