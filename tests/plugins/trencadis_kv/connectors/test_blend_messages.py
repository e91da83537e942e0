from __future__ import annotations

import msgspec
import pytest

from trencadis.errors import TransferError
from trencadis.records import TransferCause
from trencadis_kv.connectors.blend.messages import (
    AssembleOrder,
    BlendOrders,
    ChunkPlace,
    SaveChunkOrder,
    decode_orders,
    encode_orders,
)


def test_orders_arrive_as_they_were_sent():
    orders = BlendOrders(
        saves=[SaveChunkOrder(3, b"k" * 32, 20, 7, 6, [0, 2], [9, 4])],
        assemblies=[AssembleOrder(5, b"\x01\x00\x00\x00", 4, [1, 2], [ChunkPlace(b"c" * 32, 64, 3, 4, 20)], 0.25)],
        cancels=[8],
    )
    assert decode_orders(encode_orders(orders)) == orders


def test_nothing_to_do_is_an_empty_message():
    assert encode_orders(BlendOrders()) == b""
    assert decode_orders(b"") == BlendOrders()


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (b"\xff", TransferCause.CORRUPT),
        (msgspec.msgpack.encode([1, [["x"]]]), TransferCause.CORRUPT),
        (msgspec.msgpack.encode([2]), TransferCause.INCOMPATIBLE),
    ],
)
def test_what_is_no_message_is_refused(message, cause):
    with pytest.raises(TransferError) as caught:
        decode_orders(message)
    assert caught.value.cause == cause
