from __future__ import annotations

import contextlib

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from trencadis.clock import SimulatedClock
from trencadis.errors import InvalidRequestError
from trencadis_server.context import Admission
from trencadis_server.errors import TooBusyError
from trencadis_server.middleware.limits import MAX_RETRY_AFTER_S, MIN_RETRY_AFTER_S, AdmissionControl, DrainRate


def make(max_requests=2, max_waiting_tokens=10, clock=None):
    clock = clock or SimulatedClock()
    return AdmissionControl(max_requests=max_requests, max_waiting_tokens=max_waiting_tokens, clock=clock)


def test_it_is_what_endpoints_expect():
    assert isinstance(make(), Admission)


def test_a_request_over_the_cap_is_refused_and_the_cap_is_named():
    admission = make()
    with admission.hold(1), admission.hold(1):
        with pytest.raises(TooBusyError, match=r"takes 2 at once \(server.max_requests\)\. "), admission.hold(1):
            pass
        assert admission.num_requests == 2
    with admission.hold(1):
        assert admission.num_requests == 1


def test_a_request_for_several_texts_is_told_how_many_it_counts_as():
    admission = make(max_requests=4)
    with (
        admission.hold(1, 2),
        pytest.raises(TooBusyError, match=r"has 2 requests and takes 4 at once .*; this request counts as 3\. "),
        admission.hold(1, 3),
    ):
        pass


def test_prompt_tokens_count_until_the_first_token():
    admission = make()
    with admission.hold(8) as first:
        with pytest.raises(TooBusyError, match="8 prompt tokens wait"), admission.hold(3):
            pass
        first.first_token()
        first.first_token()
        assert admission.num_waiting_tokens == 0
        with admission.hold(10):
            assert admission.num_waiting_tokens == 10
    assert (admission.num_requests, admission.num_waiting_tokens) == (0, 0)


@pytest.mark.parametrize(
    ("tokens", "requests", "setting"), [(1, 3, "server.max_requests"), (11, 1, "server.max_waiting")]
)
def test_what_would_not_fit_an_empty_server_is_refused_for_good(tokens, requests, setting):
    admission = make()
    with pytest.raises(InvalidRequestError, match=setting), admission.hold(tokens, requests):
        pass
    assert (admission.num_requests, admission.num_waiting_tokens) == (0, 0)


def shared(share=0.5):
    return AdmissionControl(max_requests=64, max_waiting_tokens=1000, clock=SimulatedClock(), caller_share=share)


def test_requests_with_many_choices_of_one_caller_leave_room_for_others():
    admission = shared()
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(admission.hold(10, 16, caller="ann"))
        message = (
            r"^The API key 'ann' has 32 requests and may have 32 at once "
            r"\(server\.key_share = 0\.5 of server\.max_requests = 64\); this request has 16\."
        )
        with pytest.raises(TooBusyError, match=message), admission.hold(10, 16, caller="ann"):
            pass
        stack.enter_context(admission.hold(10, 32, caller="ben"))
        with pytest.raises(TooBusyError, match="The server has 64 requests"), admission.hold(1, caller="cyd"):
            pass
    with admission.hold(10, 32, caller="ann"):
        assert admission.num_requests == 32


def test_prompt_tokens_of_one_caller_leave_room_for_others():
    admission = shared(share=0.25)
    with admission.hold(200, caller="ann") as hold:
        with (
            pytest.raises(TooBusyError, match=r"'ann' has 200 waiting prompt tokens and may have 250 at once"),
            admission.hold(51, caller="ann"),
        ):
            pass
        with admission.hold(250, caller="ben"):
            pass
        hold.first_token()
        with admission.hold(250, caller="ann"):
            pass


@pytest.mark.parametrize("asked", [(1, 33), (501, 1)])
def test_a_request_that_alone_is_more_than_a_share_is_refused_for_good(asked):
    admission = shared()
    with pytest.raises(InvalidRequestError, match=r"server.key_share = 0\.5"), admission.hold(*asked, caller="ann"):
        pass
    with shared(share=1.0).hold(*asked, caller="ann"):
        pass


def test_a_share_is_never_less_than_one_request():
    admission = AdmissionControl(max_requests=1, max_waiting_tokens=10, clock=SimulatedClock(), caller_share=0.5)
    with admission.hold(1, caller="ann"):
        pass


def test_retry_after_follows_the_rate_at_which_requests_leave():
    clock = SimulatedClock()
    admission = make(max_requests=10, max_waiting_tokens=1000, clock=clock)
    with contextlib.ExitStack() as held:
        for _ in range(8):
            held.enter_context(admission.hold(1))
        for _ in range(5):  # one leaves every four seconds
            with admission.hold(1):
                clock.advance(4.0)
        with pytest.raises(TooBusyError) as refused, admission.hold(1, 4):
            pass
    # Two places too few, five left in 20 s.
    assert refused.value.retry_after_s == pytest.approx(2 * 20 / 5)


def test_while_nothing_has_left_it_is_expected_to_take_as_long_again():
    clock = SimulatedClock()
    admission = make(max_requests=1, clock=clock)
    with admission.hold(1):
        clock.advance(7.0)
        with pytest.raises(TooBusyError) as refused, admission.hold(1):
            pass
    assert refused.value.retry_after_s == pytest.approx(7.0)


def test_an_idle_hour_does_not_count_as_slowness():
    clock = SimulatedClock()
    admission = make(max_requests=1, clock=clock)
    clock.advance(3600.0)
    with admission.hold(1):
        clock.advance(2.0)
        with pytest.raises(TooBusyError) as refused, admission.hold(1):
            pass
    assert refused.value.retry_after_s == pytest.approx(2.0)


@pytest.mark.parametrize(("seconds", "expected"), [(0.0, MIN_RETRY_AFTER_S), (10_000.0, 30.0)])
def test_the_estimate_of_an_empty_history_is_bounded(seconds, expected):
    clock = SimulatedClock()
    rate = DrainRate(clock)
    clock.advance(seconds)
    assert rate.seconds_for(5) == expected


def test_the_estimate_never_exceeds_a_minute():
    clock = SimulatedClock()
    rate = DrainRate(clock)
    clock.advance(20.0)
    rate.note(1)
    assert rate.seconds_for(10_000) == MAX_RETRY_AFTER_S


holds = st.lists(
    st.tuples(st.sampled_from(["enter", "token", "leave", "raise"]), st.integers(0, 6), st.integers(1, 3)), max_size=60
)


@settings(max_examples=150, phases=[Phase.explicit, Phase.generate])
@given(holds)
def test_no_sequence_of_holds_leaks_or_exceeds_a_cap(steps):
    clock = SimulatedClock()
    admission = make(max_requests=4, max_waiting_tokens=12, clock=clock)
    estimates: list[float] = []
    live: list[tuple[contextlib.ExitStack, object, int, int, list[bool]]] = []
    for action, tokens, requests in steps:
        clock.advance(0.5)
        if action == "enter":
            stack = contextlib.ExitStack()
            try:
                hold = stack.enter_context(admission.hold(tokens, requests))
            except TooBusyError as error:
                estimates.append(error.retry_after_s)
            else:
                live.append((stack, hold, tokens, requests, [True]))
        elif live:
            stack, hold, _, _, waits = live[tokens % len(live)]
            if action == "token":
                hold.first_token()
                waits[0] = False
            else:
                live.pop(tokens % len(live))
                error = ValueError("the request failed") if action == "raise" else None
                stack.__exit__(type(error) if error else None, error, None)
        assert admission.num_requests == sum(one[3] for one in live) <= 4
        assert admission.num_waiting_tokens == sum(one[2] for one in live if one[4][0]) <= 12
    assert all(MIN_RETRY_AFTER_S <= estimate <= MAX_RETRY_AFTER_S for estimate in estimates)
    for stack, *_ in live:
        stack.close()
    assert (admission.num_requests, admission.num_waiting_tokens) == (0, 0)
