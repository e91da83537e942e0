from __future__ import annotations

import attrs

from trencadis.records import Request
from trencadis_plugins.speculation.by_sequence import BySequence

ONE, TWO = (Request(request_id=name, prompt_token_ids=(1,)) for name in ("one", "two"))


def make_states() -> BySequence[list[str]]:
    return BySequence(lambda request: [request.request_id])


def test_a_sequence_keeps_its_state():
    states = make_states()
    first = states.get(3, ONE)
    assert states.get(3, ONE) is first
    assert states.known(3) is first
    assert states.known(4) is None


def test_another_request_in_the_slot_gets_a_new_one():
    states = make_states()
    states.get(3, ONE)
    assert states.get(3, TWO) == ["two"]
    assert len(states) == 1


def test_an_equal_request_is_not_the_same_one():
    states = make_states()
    first = states.get(3, ONE)
    assert states.get(3, attrs.evolve(ONE)) is not first


def test_a_dropped_state_is_returned_once():
    states = make_states()
    first = states.get(3, ONE)
    assert states.drop(3) is first
    assert states.drop(3) is None
    assert states.get(3, ONE) is not first


def test_a_renewed_state_takes_the_place_of_the_old_one():
    states = make_states()
    first = states.get(3, TWO)
    new = states.renew(3, TWO)
    assert new == ["two"]
    assert new is not first
    assert states.get(3, TWO) is new


def test_clear_forgets_all():
    states = make_states()
    states.get(3, ONE)
    states.clear()
    assert len(states) == 0
