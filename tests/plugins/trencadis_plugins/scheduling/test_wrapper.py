from __future__ import annotations

import numpy as np
import pytest

from trencadis.interfaces import SchedulingPolicy, TokenSplit
from trencadis_plugins.scheduling.wrapper import Wrapper


class Inner(SchedulingPolicy):
    """Answers nothing that the defaults would."""

    def __init__(self):
        self.told = []

    def admit(self, request, *, num_waiting, num_waiting_tokens):
        return f"{request.request_id} {num_waiting} {num_waiting_tokens}"

    def admit_tenant(self, request, *, num_waiting, num_waiting_tokens):
        return f"tenant {request.request_id} {num_waiting} {num_waiting_tokens}"

    def on_added(self, *, slot, request):
        self.told.append((slot, request.request_id))

    def order(self, view):
        return view.waiting[::-1]

    def split(self, view, *, token_budget):
        return TokenSplit(token_budget - 1, token_budget - 2)

    def chunk(self, view, *, slot, num_remaining, token_budget):
        return slot + num_remaining + token_budget

    def victim(self, view, *, candidates):
        return int(candidates[0])

    def on_finished(self, *, slot, tenant, num_output_tokens):
        self.told.append((slot, tenant, num_output_tokens))


@pytest.fixture
def wrapper():
    return Wrapper(Inner())


def test_every_question_is_the_inner_policys(wrapper, view_of, request_of):
    view = view_of(waiting=[3, 4])
    assert wrapper.admit(request_of("a"), num_waiting=2, num_waiting_tokens=3) == "a 2 3"
    assert wrapper.admit_tenant(request_of("a"), num_waiting=2, num_waiting_tokens=3) == "tenant a 2 3"
    assert wrapper.order(view).tolist() == [4, 3]
    assert wrapper.split(view, token_budget=10) == TokenSplit(9, 8)
    assert wrapper.chunk(view, slot=1, num_remaining=20, token_budget=300) == 321
    assert wrapper.victim(view, candidates=np.array([6, 2], np.int32)) == 6


def test_everything_is_told_to_the_inner_policy(wrapper, request_of):
    wrapper.on_added(slot=3, request=request_of("a"))
    wrapper.on_finished(slot=3, tenant=1, num_output_tokens=7)
    assert wrapper.inner.told == [(3, "a"), (3, 1, 7)]
