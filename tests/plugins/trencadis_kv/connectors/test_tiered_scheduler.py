from __future__ import annotations

import msgspec
import pytest

from support.kv.tiered_children import loop, raising, scripted, tiers
from trencadis.clock import SimulatedClock
from trencadis.interfaces import SupportsRemotePrefill
from trencadis.records import ConnectorReport, FailedLoad, KVLayout, Request
from trencadis_kv.connectors.tiered.child import CLOSED
from trencadis_kv.connectors.tiered.worker import Orders
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


def test_children_are_told_of_offers_that_nobody_takes():
    """Of those that lost, of those that have no more than the local hit, and of the winner if the engine has no room."""
    scene = Scene(*(scripted(num_tokens=n) for n in (4, 10, 8, 0)))
    found = scene.lookup(num_local_tokens=4)
    assert [scene.told(i, "on_unused") for i in range(4)] == [[("on_unused", 0)], [], [("on_unused", 0)], []]
    scene.side.on_unused(found.transfer_id)
    assert scene.told(1, "on_unused") == [("on_unused", 0)]
    scene.side.on_unused(found.transfer_id)
    assert len(scene.told(1, "on_unused")) == 1
    scene.load()
    assert len(scene.told(1, "on_unused")) == 1, "this one is taken"


def test_children_are_told_of_answers_to_a_request_that_is_given_up_meanwhile():
    scene = Scene(scripted(num_tokens=8), scripted(pending=True))
    assert scene.lookup().pending
    assert scene.told(0, "on_unused") == []
    scene.side.on_abandoned(request())
    assert scene.told(0, "on_unused") == [("on_unused", 0)]
    scene.side.on_abandoned(request())
    assert len(scene.told(0, "on_unused")) == 1


def test_the_policy_chooses_among_what_is_beyond_the_local_hit():
    class Last(KVPolicy):
        def choose_source(self, sources):
            self.seen = [(source.name, source.num_tokens) for source in sources]
            return len(sources) - 1

    policy = Last()
    scene = Scene(*(scripted(num_tokens=n) for n in (8, 4, 6)), policy=policy)
    assert scene.lookup(num_local_tokens=4).num_tokens == 6
    assert policy.seen == [("tier0", 4), ("tier2", 2)]


@pytest.mark.parametrize("answer", [7, "near", None])
def test_a_policy_that_chooses_nothing_there_is_costs_a_warning(answer, caplog):
    class Confused(KVPolicy):
        def choose_source(self, sources):
            return answer

    scene = Scene(scripted(num_tokens=4), scripted(num_tokens=8), policy=Confused())
    assert scene.lookup().num_tokens == 8
    assert "the KV policy Confused answered" in caplog.text


def test_the_policy_is_told_what_was_measured():
    class Watching(KVPolicy):
        def choose_source(self, sources):
            self.seen = sources
            return 0

    policy = Watching()
    scene = Scene(scripted(num_tokens=8), policy=policy)
    scene.side.on_step(num_tokens=100, device_s=1.0)
    transfer_id = scene.load("a")
    scene.clock.advance(0.5)
    scene.side.on_report(ConnectorReport(loaded=(transfer_id,)))
    scene.lookup("b")
    (source,) = policy.seen
    assert source.compute_s == pytest.approx(0.08)
    assert source.load_s == pytest.approx(0.5 * 8 / 12)  # three blocks took half a second


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


def test_a_cancelled_load_is_told_to_its_child_behind_its_begin():
    scene = Scene(scripted(num_tokens=4), scripted(num_tokens=8))
    transfer_id = scene.load()
    scene.side.on_cancelled(transfer_id)
    assert scene.orders().releases == [transfer_id]
    assert [call[0] for call in scene.children[1].told[-2:]] == ["on_allocated", "on_cancelled"]
    assert scene.children[1].told[-1] == ("on_cancelled", 0)
    assert scene.told(0, "on_cancelled") == []


def test_reports_come_to_the_child_that_they_concern_under_its_own_transfer_ids():
    scene = Scene(scripted(num_tokens=8), scripted())
    scene.load("a")
    transfer_id = scene.load("b")
    scene.side.on_report(ConnectorReport(loaded=(transfer_id,)))
    assert scene.told(0, "on_report") == [("on_report", ConnectorReport(loaded=(1,)))]
    assert scene.told(1, "on_report") == []


def test_what_a_far_child_loaded_is_offered_to_those_before_it():
    scene = Scene(scripted(), scripted(num_tokens=4), scripted(num_tokens=12), scripted())
    scene.side.on_report(ConnectorReport(loaded=(scene.load(),)))
    for i in range(4):
        expected = [("on_computed", [5, 6, 7], list(HASHES))] if i < 2 else []
        assert scene.told(i, "on_computed") == expected
    assert scene.count("promoted_blocks_total", tier="tier0") == 3


def test_nothing_is_promoted_that_did_not_arrive_or_if_it_is_off():
    scene = Scene(scripted(), scripted(num_tokens=12))
    scene.side.on_report(
        ConnectorReport(failed=(FailedLoad(transfer_id=scene.load(), num_valid_tokens=8, cause="evicted"),))
    )
    off = Scene(scripted(), scripted(num_tokens=12), promote=False)
    off.side.on_report(ConnectorReport(loaded=(off.load(),)))
    assert scene.told(0, "on_computed") == off.told(0, "on_computed") == []


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


def test_a_child_may_want_a_failed_load_looked_up_again():
    scene = Scene(scripted(num_tokens=12, retries=True))
    failed = FailedLoad(transfer_id=scene.load(), num_valid_tokens=0, cause="lost")
    scene.side.on_report(ConnectorReport(failed=(failed,)))
    assert scene.side.on_failed(request(), failed) == "retry"


def test_blocks_that_several_hold_have_one_transfer_id():
    scene = Scene(scripted(holds=[3, 4]), scripted(), scripted(holds=[3]))
    both = scene.side.on_finished(request("a"), blocks=[1])
    one = scene.side.on_finished(request("b"), blocks=[2])
    none = scene.side.on_finished(request("c"), blocks=[3])
    orders = scene.orders()
    assert (one, none) == (4 * 4 + 0, None)
    assert [(hold.transfer_id, hold.members) for hold in orders.holds] == [(both, [3 * 4 + 0, 3 * 4 + 2])]
    assert orders.releases == [12, 14, 16]


def test_a_child_that_does_not_give_blocks_back_is_closed_alone():
    scene = Scene(scripted(num_tokens=8), scripted(num_tokens=4), release_timeout_s=10.0)
    scene.side.on_cancelled(scene.load())
    scene.side.take_message()
    scene.clock.advance(9.9)
    assert scene.orders() is None
    scene.clock.advance(0.2)
    assert scene.orders().close == [0]
    assert scene.orders() is None, "it is closed once"
    assert ("close",) in scene.children[0].told
    assert scene.lookup("b").num_tokens == 4


def test_a_child_that_gives_blocks_back_in_time_is_not_closed():
    scene = Scene(scripted(num_tokens=8), release_timeout_s=10.0)
    transfer_id = scene.load()
    scene.side.on_cancelled(transfer_id)
    scene.side.on_report(ConnectorReport(released=(transfer_id,)))
    scene.side.take_message()
    scene.clock.advance(20.0)
    assert scene.orders() is None


def test_the_worker_side_is_asked_who_still_holds_what_several_held():
    scene = Scene(scripted(holds=[1]), scripted(holds=[1]), release_timeout_s=10.0)
    transfer_id = scene.side.on_finished(request(), blocks=[1])
    scene.side.take_message()
    scene.clock.advance(11.0)
    orders = scene.orders()
    assert (orders.overdue, orders.close) == ([transfer_id], [])
    assert scene.orders() is None


def test_a_child_whose_worker_side_was_closed_is_asked_no_more():
    scene = Scene(scripted(num_tokens=8), scripted(num_tokens=4))
    scene.side.on_report(
        ConnectorReport(failed=(FailedLoad(transfer_id=scene.load(), num_valid_tokens=0, cause=CLOSED),))
    )
    assert scene.lookup("b").num_tokens == 4
    assert scene.count("state", tier="tier0") == 3


def test_a_transfer_id_that_is_given_twice_is_not_taken():
    scene = Scene(scripted(num_tokens=8), scripted(num_tokens=4))
    scene.load("a")
    scene.children[0].transfer_ids = iter([0])
    assert scene.lookup("b").num_tokens == 4


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


def test_metrics_of_children_have_their_names():
    scene = Scene(scripted(), scripted())
    scene.children[1].metrics = lambda: "# TYPE own_total counter\nown_total 4.0\n"
    assert 'own_total{tier="tier1"} 4.0' in scene.side.metrics()


def test_requests_that_a_child_brings_are_the_engines_and_their_ends_the_childs():
    scene, woken, told = Scene(loop(), scripted()), [], []
    child = scene.children[1]
    child.take_requests = lambda: [request("remote")]
    child.take_withdrawn = lambda: ["old"]
    child.on_waker = told.append
    child.on_role = told.append
    child.on_sampling = told.append
    child.on_backlog = told.append
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


def test_it_has_remote_prefills_only_if_a_child_has():
    assert not isinstance(Scene(loop(), loop()).side, SupportsRemotePrefill)
    assert isinstance(Scene(loop(), scripted()).side, SupportsRemotePrefill)


def test_a_child_is_called_for_the_capabilities_that_it_has(caplog):
    """The loop has no step times, no metrics and no remote prefills."""
    scene = Scene(loop(), scripted())
    scene.side.on_step(num_tokens=1, device_s=0.1)
    scene.side.on_waker(print)
    assert scene.side.take_requests() == []
    assert "tier0" not in scene.side.metrics().replace('tier_state{tier="tier0"}', "")
    assert "raised" not in caplog.text
    assert scene.told(1, "on_waker") == [("on_waker", print)]
