from __future__ import annotations

import attrs

from trencadis.records import Request
from trencadis_plugins.speculation.by_sequence import BySequence

ONE, TWO = (Request(request_id=name, prompt_token_ids=(1,)) for name in ("one", "two"))


def test_a_sequence_keeps_its_state_until_it_is_dropped_renewed_or_another_request_has_the_slot():
    states = BySequence(lambda request: [request.request_id])
    first = states.get(3, ONE)
    assert states.get(3, ONE) is states.known(3) is first
    assert states.known(4) is None
    assert states.get(3, attrs.evolve(ONE)) is not first, "an equal request is not the same one"
    assert states.get(3, TWO) == ["two"]
    assert len(states) == 1
    new = states.renew(3, TWO)
    assert states.get(3, TWO) is new
    assert (states.drop(3), states.drop(3)) == (new, None)
    states.get(3, ONE)
    states.clear()
    assert len(states) == 0
