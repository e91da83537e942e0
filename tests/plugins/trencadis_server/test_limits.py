from __future__ import annotations

import contextlib

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from trencadis.clock import SimulatedClock
from trencadis.errors import InvalidRequestError
from trencadis_server.errors import TooBusyError
from trencadis_server.middleware.limits import MAX_RETRY_AFTER_S, MIN_RETRY_AFTER_S, AdmissionControl, DrainRate


def make(max_requests=2, max_waiting_tokens=10, clock=None, **more):
    clock = clock or SimulatedClock()
    return AdmissionControl(max_requests=max_requests, max_waiting_tokens=max_waiting_tokens, clock=clock, **more)


def test_a_request_over_the_cap_is_refused_and_the_cap_is_named():
    admission = make()
    with admission.hold(1), admission.hold(1):
        with pytest.raises(TooBusyError, match=r"takes 2 at once \(server.max_requests\)\. "), admission.hold(1):
            pass
        assert admission.num_requests == 2
        message = r"has 2 requests and takes 2 at once .*; this request counts as 2\. "
        with pytest.raises(TooBusyError, match=message), admission.hold(1, 2):
            pass
    with admission.hold(1):
        assert admission.num_requests == 1


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
    return make(64, 1000, caller_share=share)


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
    with shared(share=1.0).hold(*asked, caller="ann"), make(max_requests=1, caller_share=0.5).hold(1, caller="ann"):
        pass  # a share is never less than one request


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


@pytest.mark.parametrize("idle_s", [0.0, 3600.0])
def test_while_nothing_has_left_it_is_expected_to_take_as_long_again_whatever_was_before(idle_s):
    clock = SimulatedClock()
    admission = make(max_requests=1, clock=clock)
    clock.advance(idle_s)
    with admission.hold(1):
        clock.advance(7.0)
        with pytest.raises(TooBusyError) as refused, admission.hold(1):
            pass
    assert refused.value.retry_after_s == pytest.approx(7.0)


@pytest.mark.parametrize(
    ("seconds", "num_left", "num_wanted", "expected"),
    [(0.0, 0, 5, MIN_RETRY_AFTER_S), (10_000.0, 0, 5, 30.0), (20.0, 1, 10_000, MAX_RETRY_AFTER_S)],
)
@pytest.mark.representatives(3)
def test_the_estimate_is_bounded(seconds, num_left, num_wanted, expected):
    clock = SimulatedClock()
    rate = DrainRate(clock)
    clock.advance(seconds)
    if num_left:
        rate.note(num_left)
    assert rate.seconds_for(num_wanted) == expected


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
