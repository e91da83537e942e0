from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.kv.tiered_children import RaisingWorker, ScriptedWorker
from trencadis.records import ConnectorReport, FailedLoad
from trencadis_kv.connectors.tiered.child import CLOSED
from trencadis_kv.connectors.tiered.worker import Hold, Orders, TieredWorker, TransferIds


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


NAMES = TransferIds(2)


def worker(*sides):
    return TieredWorker([f"tier{i}" for i in range(len(sides))], sides)


def begin(side, before=(b"", b""), after=(b"", b""), **orders):
    side.begin_step(msgspec.msgpack.encode(Orders(list(before), list(after), **orders)))


def step(side, **orders):
    begin(side, **orders)
    side.end_step()
    return side.poll()


def test_every_child_has_its_part_of_the_message_and_all_save_before_one_loads():
    near, far = ScriptedWorker(), ScriptedWorker()
    side = worker(near, far)
    begin(side, before=(b"a", b"b"), after=(b"", b"d"))
    assert near.told == [("begin_step", b"a"), "end_step", ("begin_step", b"")]
    assert far.told == [("begin_step", b"b"), "end_step", ("begin_step", b"d")]


def test_a_step_without_loads_is_one_step():
    near, far = ScriptedWorker(), ScriptedWorker()
    side = worker(near, far)
    begin(side, before=(b"a", b""))
    side.end_step()
    side.begin_step(b"")
    assert near.told == [("begin_step", b"a"), "end_step", ("begin_step", b"")]
    assert far.told == [("begin_step", b""), "end_step", ("begin_step", b"")]


def test_reports_become_one_with_the_transfer_ids_that_the_engine_knows():
    near, far = ScriptedWorker(), ScriptedWorker()
    side = worker(near, far)
    near.report = ConnectorReport(loaded=(1,), released=(2,))
    far.report = ConnectorReport(loaded=(1,), failed=(FailedLoad(transfer_id=4, num_valid_tokens=8, cause="lost"),))
    report = side.poll()
    assert report.loaded == (NAMES.outside(0, 1), NAMES.outside(1, 1))
    assert report.failed == (FailedLoad(transfer_id=NAMES.outside(1, 4), num_valid_tokens=8, cause="lost"),)
    assert report.released == (NAMES.outside(0, 2),)
    assert side.poll() == ConnectorReport()


def test_blocks_that_two_hold_are_released_with_the_second():
    near, far = ScriptedWorker(), ScriptedWorker()
    side = worker(near, far)
    members, shared = [NAMES.outside(0, 1), NAMES.outside(1, 1)], NAMES.shared(0)
    assert step(side, releases=members, holds=[Hold(shared, members)]).released == ()
    far.report = ConnectorReport(released=(1,))
    assert side.poll().released == ()
    near.report = ConnectorReport(released=(1,))
    assert side.poll().released == (shared,)


def test_one_that_is_closed_gives_back_what_it_had_and_what_it_gets_later():
    near, far = ScriptedWorker(), ScriptedWorker()
    side = worker(near, far)
    load, given_up, kept = NAMES.outside(0, 1), NAMES.outside(0, 2), NAMES.outside(1, 1)
    assert step(side, loads=[load, given_up, kept]) == ConnectorReport()
    assert step(side, releases=[given_up]) == ConnectorReport()
    report = step(side, close=[0])
    assert near.told.count("close") == 1
    assert report.failed == (FailedLoad(transfer_id=load, num_valid_tokens=0, cause=CLOSED),)
    assert report.released == (given_up,)
    later = step(side, loads=[NAMES.outside(0, 7)], before=(b"x", b"y"))
    assert later.failed[0].transfer_id == NAMES.outside(0, 7)
    assert ("begin_step", b"x") not in near.told
    assert far.told.count("close") == 0


def test_one_that_keeps_blocks_which_others_have_released_is_closed():
    near, far = ScriptedWorker(), ScriptedWorker()
    side = worker(near, far)
    members, shared = [NAMES.outside(0, 1), NAMES.outside(1, 1)], NAMES.shared(0)
    step(side, releases=members, holds=[Hold(shared, members)])
    near.report = ConnectorReport(released=(1,))
    side.poll()
    assert step(side, overdue=[shared]).released == (shared,)
    assert (near.told.count("close"), far.told.count("close")) == (0, 1)


def test_one_that_keeps_raising_is_closed_and_the_other_goes_on(caplog):
    far = ScriptedWorker()
    side = worker(RaisingWorker(), far)
    load = NAMES.outside(0, 1)
    far.report = ConnectorReport(loaded=(9,))
    report = step(side, loads=[load])
    assert report.loaded == (NAMES.outside(1, 9),)
    assert report.failed[0].transfer_id == load
    assert "the KV connector tier0 raised 3 times in a row and is closed." in caplog.text
    side.close()


def test_one_that_raises_now_and_then_is_kept():
    class Moody(ScriptedWorker):
        def begin_step(self, message):
            raise RuntimeError("not today")

    moody = Moody()
    side = worker(moody, ScriptedWorker())
    for _ in range(10):
        step(side)
    assert "close" not in moody.told


@pytest.mark.parametrize("broken", [0, 1])
def test_one_that_cannot_use_the_cache_is_closed(broken):
    class Picky(ScriptedWorker):
        def register(self, kv_cache):
            raise TypeError("no such cache")

    sides = [ScriptedWorker(), ScriptedWorker()]
    sides[broken] = Picky()
    worker(*sides).register(None)
    assert ["close" in side.told for side in sides] == [i == broken for i in range(2)]


def test_close_closes_all():
    near, far = ScriptedWorker(), ScriptedWorker()
    side = worker(near, far)
    side.close()
    side.close()
    assert "close" in near.told
    assert "close" in far.told


def test_waiting_ends_with_the_last_child_that_can_say():
    near, far = ScriptedWorker(), ScriptedWorker()
    side, asked = worker(near, far), []
    far.wait_idle = lambda timeout_s: asked.append(timeout_s) or False
    assert not side.wait_idle(3.0)
    assert 0.0 <= asked[0] <= 3.0
    far.wait_idle = lambda timeout_s: True
    assert side.wait_idle(60.0)
