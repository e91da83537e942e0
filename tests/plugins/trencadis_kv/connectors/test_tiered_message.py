from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from trencadis_kv.connectors.tiered.worker import Hold, Orders, TransferIds


@given(st.integers(1, 9), st.integers(-5, 2**62), st.data())
def test_transfer_ids_are_called_differently_for_every_child_and_come_back(num_children, number, data):
    names = TransferIds(num_children)
    child = data.draw(st.integers(0, num_children - 1))
    assert names.inside(names.outside(child, number)) == (child, number)
    assert names.inside(names.shared(number)) == (num_children, number)
    everything = {names.outside(i, n) for i in range(num_children) for n in (number, number + 1)}
    assert len(everything | {names.shared(number), names.shared(number + 1)}) == 2 * num_children + 2


def test_orders_come_over_whole():
    orders = Orders([b"a", b""], [b"", b"\xff"], [1], [5, 2**70 % 2**63], [Hold(8, [3, 4])], [8], [1])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(orders), type=Orders) == orders
