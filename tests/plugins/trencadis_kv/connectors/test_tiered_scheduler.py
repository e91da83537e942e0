from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.kv.tiered_children import RaisingWorker, ScriptedWorker, loop, raising, scripted, tiers
from trencadis.clock import SimulatedClock
from trencadis.interfaces import SupportsRemotePrefill
from trencadis.records import ConnectorReport, FailedLoad, KVLayout, Request
from trencadis_kv.connectors.tiered.child import CLOSED
from trencadis_kv.connectors.tiered.worker import Hold, Orders, TieredWorker, TransferIds
from trencadis_kv.interfaces import KVPolicy

LAYOUT = KVLayout(parts=(), block_size=4, last_head=1, numerics="any")


HASHES = (b"1", b"2", b"3")


def request(name="r"):
    return Request(request_id=name, prompt_token_ids=tuple(range(1, 14)))


class Scene:
    """A tiered scheduler side over scripted children."""

    def __init__(self, *children, policy=None, **options):
        self.clock = SimulatedClock()
        self.children = [child.scheduler for child in children]
        named = {f"tier{i}": child for i, child in enumerate(children)}
        self.side = tiers(named, clock=self.clock, policy=policy, **options).scheduler
        self.side.on_ready(LAYOUT)

    def lookup(self, name="r", *, num_local_tokens=0):
        return self.side.lookup(request(name), block_hashes=HASHES, num_local_tokens=num_local_tokens)

    def load(self, name="r"):
        found = self.lookup(name)
        self.side.on_allocated(found.transfer_id, blocks=[5, 6, 7], block_hashes=HASHES)
        return found.transfer_id

    def orders(self):
        message = self.side.take_message()
        return msgspec.msgpack.decode(message, type=Orders) if message else None

    def told(self, child, name):
        return [call for call in self.children[child].told if call[0] == name]

    def count(self, name, **labels):
        return self.side._counters.value(name, **labels)


@pytest.mark.parametrize(("tokens", "chosen"), [((4, 8), 1), ((8, 4), 0), ((8, 8), 0), ((4, 8, 8), 1)])
def test_the_longest_prefix_wins_and_the_nearest_of_equals(tokens, chosen):
    scene = Scene(*(scripted(num_tokens=n) for n in tokens))
    assert scene.lookup().num_tokens == max(tokens)
    scene.load()
    scene.side.take_message()
    assert [bool(scene.told(i, "on_allocated")) for i in range(len(tokens))] == [
        i == chosen for i in range(len(tokens))
    ]


def test_children_are_told_of_offers_that_nobody_takes_and_of_requests_that_are_given_up():
    """Of those that lost, of those that have no more than the local hit, and of the winner if the engine has no room."""
    scene = Scene(*(scripted(num_tokens=n) for n in (4, 10, 8, 0)))
    found = scene.lookup(num_local_tokens=4)
    assert [scene.told(i, "on_unused") for i in range(4)] == [[("on_unused", 0)], [], [("on_unused", 0)], []]
    for _ in range(2):
        scene.side.on_unused(found.transfer_id)
        assert scene.told(1, "on_unused") == [("on_unused", 0)]
    scene.load()
    assert len(scene.told(1, "on_unused")) == 1, "this one is taken"
    waits = Scene(scripted(num_tokens=8), scripted(pending=True))
    assert waits.lookup().pending
    assert waits.told(0, "on_unused") == []
    for _ in range(2):
        waits.side.on_abandoned(request())
        assert waits.told(0, "on_unused") == [("on_unused", 0)]


class Choosing(KVPolicy):
    def __init__(self, answer):
        self.answer = answer

    def choose_source(self, sources):
        self.seen = sources
        return self.answer


def test_the_policy_chooses_among_what_is_beyond_the_local_hit_and_is_told_what_was_measured():
    policy = Choosing(1)
    scene = Scene(*(scripted(num_tokens=n) for n in (8, 4, 6)), policy=policy)
    assert scene.lookup(num_local_tokens=4).num_tokens == 6
    assert [(source.name, source.num_tokens) for source in policy.seen] == [("tier0", 4), ("tier2", 2)]
    scene = Scene(scripted(num_tokens=8), policy=(policy := Choosing(0)))
    scene.side.on_step(num_tokens=100, device_s=1.0)
    transfer_id = scene.load("a")
    scene.clock.advance(0.5)
    scene.side.on_report(ConnectorReport(loaded=(transfer_id,)))
    scene.lookup("b")
    (source,) = policy.seen
    assert (source.compute_s, source.load_s) == pytest.approx((0.08, 0.5 * 8 / 12))  # three blocks took half a second


@pytest.mark.parametrize("answer", [7, "near", None])
def test_a_policy_that_chooses_nothing_there_is_costs_a_warning(answer, caplog):
    scene = Scene(scripted(num_tokens=4), scripted(num_tokens=8), policy=Choosing(answer))
    assert scene.lookup().num_tokens == 8
    assert "the KV policy Choosing answered" in caplog.text


def test_a_load_is_told_behind_what_all_children_save():
    near, far = loop(), loop()
    scene = Scene(near, far)
    near.scheduler._store.blocks[HASHES[0].hex()] = []
    transfer_id = scene.lookup().transfer_id
    scene.side.on_allocated(transfer_id, blocks=[5], block_hashes=HASHES[:1])
    scene.side.on_computed(blocks=[5], block_hashes=[b"new"])
    orders = scene.orders()
    assert all(b'"save": [[5' in message for message in orders.before)
    assert not any(b'"load": [[' in message for message in orders.before)
    assert b'"load": [[0, [5]' in orders.after[0]
    assert orders.after[1] == b""
    assert orders.loads == [transfer_id]


def test_a_cancelled_load_and_reports_come_to_their_child_alone_under_its_own_transfer_ids():
    scene = Scene(scripted(num_tokens=4), scripted(num_tokens=8))
    scene.load("a")
    transfer_id = scene.load("b")
    scene.side.on_cancelled(transfer_id)
    assert scene.orders().releases == [transfer_id]
    scene.side.on_report(ConnectorReport(loaded=(transfer_id,)))
    names = [call[0] for call in scene.children[1].told if call[0] != "lookup"]
    assert names == ["on_allocated", "on_allocated", "on_cancelled", "on_report"]
    assert scene.told(1, "on_cancelled") == [("on_cancelled", 1)]
    assert scene.told(1, "on_report") == [("on_report", ConnectorReport(loaded=(1,)))]
    assert scene.told(0, "on_cancelled") == scene.told(0, "on_report") == []


@pytest.mark.parametrize("why_not", ["", "failed", "off"])
@pytest.mark.representatives(3)
def test_what_a_far_child_loaded_is_offered_to_those_before_it(why_not):
    scene = Scene(scripted(), scripted(num_tokens=4), scripted(num_tokens=12), scripted(), promote=why_not != "off")
    transfer_id = scene.load()
    failed = FailedLoad(transfer_id=transfer_id, num_valid_tokens=8, cause="evicted")
    report = ConnectorReport(failed=(failed,)) if why_not == "failed" else ConnectorReport(loaded=(transfer_id,))
    scene.side.on_report(report)
    offered = [] if why_not else [("on_computed", [5, 6, 7], list(HASHES))]
    assert [scene.told(i, "on_computed") for i in range(4)] == [offered, offered, [], []]
    assert scene.count("promoted_blocks_total", tier="tier0") == (0 if why_not else 3)


@pytest.mark.parametrize(("num_valid", "answer"), [(0, "retry"), (4, "compute"), (8, "compute")])
def test_a_failed_load_is_tried_from_another_child_that_offered_more_than_arrived(num_valid, answer):
    scene = Scene(scripted(num_tokens=12), scripted(num_tokens=4))
    scene.children[0].num_tokens = 8  # so that the far one is asked, too
    failed = FailedLoad(transfer_id=scene.load(), num_valid_tokens=num_valid, cause="unreachable")
    scene.side.on_report(ConnectorReport(failed=(failed,)))
    assert scene.side.on_failed(request(), failed) == answer
    assert scene.told(0, "on_failed") == [("on_failed", 0)]
    assert scene.lookup().num_tokens == (4 if answer == "retry" else 8), "it is asked again for the same request"
    assert scene.lookup("another").num_tokens == 8


def test_blocks_that_several_hold_have_one_transfer_id():
    scene = Scene(scripted(holds=[3, 4]), scripted(), scripted(holds=[3]))
    both = scene.side.on_finished(request("a"), blocks=[1])
    one = scene.side.on_finished(request("b"), blocks=[2])
    none = scene.side.on_finished(request("c"), blocks=[3])
    orders = scene.orders()
    assert (one, none) == (4 * 4 + 0, None)
    assert [(hold.transfer_id, hold.members) for hold in orders.holds] == [(both, [3 * 4 + 0, 3 * 4 + 2])]
    assert orders.releases == [12, 14, 16]


@pytest.mark.parametrize("in_time", [False, True])
def test_a_child_that_does_not_give_blocks_back_is_closed_alone(in_time):
    scene = Scene(scripted(num_tokens=8), scripted(num_tokens=4), release_timeout_s=10.0)
    transfer_id = scene.load()
    scene.side.on_cancelled(transfer_id)
    scene.side.take_message()
    scene.clock.advance(9.9)
    if in_time:
        scene.side.on_report(ConnectorReport(released=(transfer_id,)))
    assert scene.orders() is None
    scene.clock.advance(0.2)
    orders = scene.orders()
    assert in_time if orders is None else orders.close == [0]
    assert scene.orders() is None, "it is closed once"
    assert (("close",) in scene.children[0].told) is not in_time
    assert scene.lookup("b").num_tokens == (8 if in_time else 4)


def test_the_worker_side_is_asked_who_still_holds_what_several_held():
    scene = Scene(scripted(holds=[1]), scripted(holds=[1]), release_timeout_s=10.0)
    transfer_id = scene.side.on_finished(request(), blocks=[1])
    scene.side.take_message()
    scene.clock.advance(11.0)
    orders = scene.orders()
    assert (orders.overdue, orders.close) == ([transfer_id], [])
    assert scene.orders() is None


def test_a_child_whose_worker_side_was_closed_and_a_transfer_id_that_is_given_twice_are_not_used():
    scene, twice = (Scene(scripted(num_tokens=8), scripted(num_tokens=4)) for _ in range(2))
    failed = FailedLoad(transfer_id=scene.load(), num_valid_tokens=0, cause=CLOSED)
    scene.side.on_report(ConnectorReport(failed=(failed,)))
    assert scene.lookup("b").num_tokens == 4
    assert scene.count("state", tier="tier0") == 3
    twice.load("a")
    twice.children[0].transfer_ids = iter([0])
    assert twice.lookup("b").num_tokens == 4


def test_an_unknown_transfer_id_is_nobodys():
    scene = Scene(scripted(), scripted())
    scene.side.on_allocated(-1, blocks=[], block_hashes=[])
    scene.side.on_cancelled(-1)
    scene.side.on_report(ConnectorReport(loaded=(-1,), released=(-1,)))
    assert scene.side.on_failed(request(), FailedLoad(transfer_id=-1, num_valid_tokens=0, cause="")) == "compute"
    assert scene.orders() is None


def test_parameters_of_the_nearest_child_that_has_any_are_returned():
    scene = Scene(scripted(), scripted(params={"a": 1}), scripted(params={"b": 2}))
    assert scene.side.finished_params(request()) == {"a": 1}
    scene.side.on_rejected({"c": 3})
    assert all(scene.told(i, "on_rejected") == [("on_rejected", {"c": 3})] for i in range(3))


def test_one_that_raises_everywhere_costs_nothing_but_itself():
    scene = Scene(raising(), scripted(num_tokens=12))
    for i in range(8):
        transfer_id = scene.load(f"r{i}")
        scene.side.on_computed(blocks=[1], block_hashes=[b"x"])
        scene.side.on_step(num_tokens=100, device_s=0.1)
        scene.side.take_message()
        scene.side.on_report(ConnectorReport(loaded=(transfer_id,)))
        assert scene.side.on_finished(request(f"r{i}"), blocks=[1]) is None
        assert scene.side.finished_params(request()) is None
    assert len(scene.told(1, "on_allocated")) == 8
    assert 'trencadis_kv_tier_state{tier="tier0"} 2.0' in scene.side.metrics()
    scene.side.close()


def test_requests_that_a_child_brings_are_the_engines_and_their_ends_the_childs():
    assert not isinstance(Scene(loop(), loop()).side, SupportsRemotePrefill)
    scene, woken, told = Scene(loop(), scripted()), [], []
    child = scene.children[1]
    child.take_requests = lambda: [request("remote")]
    child.take_withdrawn = lambda: ["old"]
    child.on_waker = child.on_role = child.on_sampling = child.on_backlog = told.append
    child.on_request_token = lambda *first: told.append(first)
    child.on_abandoned = lambda one: told.append(one.request_id)
    child.on_request_ended = lambda name, **how: told.append((name, how))
    scene.side.on_waker(woken.append)
    scene.side.on_role("decode")
    scene.side.on_sampling("terms")
    scene.side.on_backlog(7)
    scene.side.on_request_token("remote", "token")
    scene.side.on_abandoned(request("gone"))
    assert [one.request_id for one in scene.side.take_requests()] == ["remote"]
    assert scene.side.take_withdrawn() == ["old"]
    scene.side.on_request_ended("remote", transfer_params={"a": 1}, error="")
    end = "remote", {"transfer_params": {"a": 1}, "error": ""}
    assert told == [woken.append, "decode", "terms", 7, ("remote", "token"), "gone", end]


def test_a_child_is_called_for_the_capabilities_that_it_has(caplog):
    """The loop has no step times, no metrics and no remote prefills."""
    scene = Scene(loop(), scripted())
    scene.side.on_step(num_tokens=1, device_s=0.1)
    scene.side.on_waker(print)
    assert scene.side.take_requests() == []
    assert "tier0" not in scene.side.metrics().replace('tier_state{tier="tier0"}', "")
    assert "raised" not in caplog.text
    assert scene.told(1, "on_waker") == [("on_waker", print)]


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


def test_waiting_ends_with_the_last_child_that_can_say():
    near, far = ScriptedWorker(), ScriptedWorker()
    side, asked = worker(near, far), []
    far.wait_idle = lambda timeout_s: asked.append(timeout_s) or False
    assert not side.wait_idle(3.0)
    assert 0.0 <= asked[0] <= 3.0
    far.wait_idle = lambda timeout_s: True
    assert side.wait_idle(60.0)
