from __future__ import annotations

import pytest

from support.kv.store_parts import GatedStore, hashes_of, make_parts, make_pool
from trencadis.errors import TransferError
from trencadis_kv.store.lookups import Lookups
from trencadis_testing.kv_faults import DictStore

HASHES = tuple(hashes_of(*range(6)))


class House:
    """Lookups over a store that has the first blocks of a chain."""

    def __init__(self, *, num_stored=4, gated=False, **settings):
        self.objects = {}
        self.asked = []
        self.store = GatedStore(self.objects) if gated else DictStore(self.objects)
        contains = self.store.contains
        self.store.contains = lambda keys: self.asked.append(len(keys)) or contains(keys)
        self.parts = make_parts(lambda: self.store, **settings)
        objects = self.parts.stored([make_pool().layout])
        self.objects.update(dict.fromkeys(objects.keys(HASHES[:num_stored]), b""))
        self.lookups = Lookups(self.parts, objects)

    def find(self, name="r", *, first=0, hashes=HASHES):
        return self.lookups.find(name, hashes, first=first)

    def settle(self):
        assert self.parts.activity.wait_idle(60.0)


@pytest.fixture
def house():
    made = []

    def make(**options):
        made.append(House(**options))
        return made[-1]

    yield make
    for one in made:
        one.lookups.close()


def test_answer_comes_from_the_thread_once_for_all_that_wait_and_is_kept(house):
    one = house(gated=True)
    assert [one.find(f"r{i}") for i in range(9)] == [None] * 9
    one.store.open()
    one.settle()
    assert [one.find(f"r{i}") for i in range(9)] * 2 == [4] * 18
    assert one.find("r0", first=2) == 4
    assert one.asked == [6]


@pytest.mark.parametrize(("num_stored", "found"), [(4, 4), (2, 3)])
def test_only_what_the_engine_has_not_got_is_asked_for(house, num_stored, found):
    one = house(num_stored=num_stored)
    assert one.find(first=3) is None
    one.settle()
    assert (one.find(first=3), one.asked) == (found, [3])


def test_later_request_asks_again_because_the_store_may_have_more(house):
    one = house(num_stored=0)
    one.find("early")
    one.settle()
    assert one.find("early") == 0
    one.objects.update(dict.fromkeys(one.parts.objects(make_pool().layout).keys(HASHES), b""))
    one.find("late")
    one.settle()
    assert one.find("late") == 6
    assert one.find("early") == 0


@pytest.mark.parametrize("other", [{"first": 1}, {"first": 4, "hashes": HASHES[:-1]}], ids=["shorter hit", "prompt"])
def test_request_whose_local_hit_shrank_or_that_is_another_asks_again(house, other):
    one = house()
    one.find(first=4)
    one.settle()
    assert one.find(first=4) == 4
    assert one.find(**other) is None
    one.settle()
    assert one.find(**other) == 4


@pytest.mark.nightly  # it waits for deadlines
def test_store_that_does_not_answer_is_a_miss_at_the_deadline_also_of_a_question_that_changed(house):
    one = house(gated=True, lookup_timeout_s=0.25)
    assert one.find() is None
    one.find("changes", first=3)
    one.parts.clock.advance(0.24)
    assert (one.find(), one.find("changes", first=2)) == (None, None)
    one.parts.clock.advance(0.02)
    with pytest.raises(TransferError, match=r"within 0\.25 s") as caught:
        one.find()
    assert caught.value.cause == "deadline"
    with pytest.raises(TransferError):
        one.find("changes", first=2)
    one.settle()  # the call was interrupted, else the gate would hold it
    assert one.find() == 0


def test_request_that_ended_while_it_waited_leaves_nothing_behind(house):
    one = house(gated=True, lookup_timeout_s=0.25)
    one.find("ended")
    one.lookups.forget("ended")
    one.find("vanished")
    assert one.lookups.num_lookups == 1
    one.store.open()
    one.settle()
    one.parts.clock.advance(1.1)
    one.find("other")
    assert one.lookups.num_lookups == 1


@pytest.mark.parametrize("answer", [lambda: 1 / 0, lambda: -1, lambda: 7], ids=["raises", "-1", "7"])
@pytest.mark.representatives(3)
def test_store_that_raises_or_answers_what_cannot_be_is_a_counted_miss(house, answer):
    one = house()
    one.store.contains = lambda keys: answer()
    assert one.find() is None
    one.settle()
    assert one.find() == 0
    assert one.parts.counters.value("transfer_failures_total", cause="raised") == 1


def test_long_chain_is_asked_in_parts_up_to_the_first_gap(house):
    hashes = hashes_of(*range(2000))
    one = house(num_stored=0)
    keys = one.parts.objects(make_pool().layout).keys(hashes)
    one.objects.update(dict.fromkeys(keys[:700], b""))
    one.find(hashes=hashes)
    one.settle()
    assert one.find(hashes=hashes) == 700
    assert one.asked == [512, 512]


def test_what_the_store_turns_out_not_to_have_is_worth_saving_again(house):
    one = house(num_stored=4)
    one.parts.recent.add(HASHES)
    one.find()
    one.settle()
    assert one.parts.recent.unknown(HASHES) == [4, 5]


def test_closed_lookups_answer_nothing_and_wait_for_nothing(house):
    one = house(gated=True)
    one.find()
    assert one.store.is_waiting.wait(60.0)
    one.lookups.close()
    assert one.find("other", hashes=HASHES[:3]) == 0
    one.settle()


def test_questions_that_wait_when_the_store_is_left_alone_are_not_asked(house):
    one = house(gated=True)
    one.find()
    assert one.store.is_waiting.wait(60.0)
    one.find("other", hashes=HASHES[:3])
    one.parts.breaker.open()
    one.store.open()
    one.settle()
    assert one.find("other", hashes=HASHES[:3]) == 0
    assert one.asked == [6]
