"""Prefills for other engines, and blocks held for them."""

from __future__ import annotations

import numpy as np
import pytest

from trencadis.clock import SimulatedClock
from trencadis.errors import TransferError
from trencadis.records import TransferCause
from trencadis_kv.connectors.p2p.params import RemotePrefix, handover_params, wants_hold
from trencadis_kv.connectors.p2p.remote_prefills import Holds, RemotePrefills
from trencadis_kv.wire.stream_messages import PrefillRequest

PREFIX = RemotePrefix(engine="e", hold_id="t", host="127.0.0.1", port=1, num_tokens=16, lease_s=7.5)
PARAMS = handover_params(PREFIX, blocks=[1])


def prefill_request(*tokens: int, **changes: object) -> PrefillRequest:
    fields = {"tenant": "key/user", "cache_salt": "s", "timeout_s": 5.0, **changes}
    return PrefillRequest(tokens=np.array(tokens, "<i4").tobytes(), **fields)  # type: ignore[arg-type]


def remote_prefills(max_remote_prefills: int = 2) -> tuple[RemotePrefills, list[str], list[str]]:
    released: list[str] = []
    woken: list[str] = []
    one = RemotePrefills(max_remote_prefills, release=released.append)
    one.wake = lambda: woken.append("wake")
    return one, released, woken


def test_prompt_becomes_a_request_of_its_tenant_that_is_held_after_one_token() -> None:
    one, _, woken = remote_prefills()
    prefill = one.enter(prefill_request(5, 6, 2**31 - 1))
    assert (woken, one.num_remote_prefills, one.num_tokens) == (["wake"], 1, 3)
    (request,) = one.take_new()
    assert (request.prompt_token_ids, request.params.max_tokens) == ((5, 6, 2**31 - 1), 1)
    assert (request.tenant, request.cache_salt) == ("key/user", "s")
    assert (request.priority, request.weight) == (0, None)
    assert wants_hold(request.transfer_params)
    assert (one.take_new(), one.take_withdrawn()) == ([], [])
    assert not prefill.wait(0.0)
    one.ended(request.request_id, PARAMS, "")
    assert prefill.wait(0.0)
    assert (prefill.prefix, one.num_remote_prefills) == (PREFIX, 0)


def test_end_without_blocks_has_its_reason_and_one_of_nobody_changes_nothing() -> None:
    one, released, _ = remote_prefills()
    prefill = one.enter(prefill_request(5))
    one.ended("another", PARAMS, "")
    one.ended(prefill.request.request_id, None, "no room")
    assert (prefill.prefix, prefill.error, released) == (None, "no room", [])


def test_more_than_may_be_here_and_all_where_none_are_taken_are_refused() -> None:
    one, _, _ = remote_prefills(max_remote_prefills=2)
    first = one.enter(prefill_request(1))
    one.enter(prefill_request(2))
    with pytest.raises(TransferError, match="2 prompts of others") as full:
        one.enter(prefill_request(3))
    assert full.value.cause == TransferCause.FULL
    one.take_new()
    one.ended(first.request.request_id, None, "")
    one.enter(prefill_request(3))
    one.accepts = False
    with pytest.raises(TransferError, match="no prompts of others"):
        one.enter(prefill_request(4))


def test_prompt_waits_its_turn_as_it_would_where_it_came_from() -> None:
    one, _, _ = remote_prefills()
    one.enter(prefill_request(5, priority=-7, weight=2.5))
    (request,) = one.take_new()
    assert (request.priority, request.weight) == (-7, 2.5)


@pytest.mark.parametrize("terms", [{"priority": 2**60}, {"weight": -1.0}, {"weight": float("nan")}], ids=str)
def test_impossible_terms_are_refused(terms: dict[str, float]) -> None:
    one, _, _ = remote_prefills()
    with pytest.raises(TransferError, match="no prompt"):
        one.enter(prefill_request(5, **terms))


def test_tokens_that_wait_are_those_of_the_engine_and_of_prompts_it_has_not_seen() -> None:
    one, _, _ = remote_prefills()
    one.num_backlog_tokens = 100
    one.enter(prefill_request(1, 2, 3))
    assert one.num_tokens == 103
    one.take_new()
    assert one.num_tokens == 100, "from now on the engine counts them"


@pytest.mark.parametrize("tokens", [b"", b"abc", b"\0" * 5])
def test_what_is_no_prompt_is_refused(tokens: bytes) -> None:
    one, _, _ = remote_prefills()
    with pytest.raises(TransferError, match="no prompt"):
        one.enter(PrefillRequest(tokens=tokens, tenant="", cache_salt="", timeout_s=1.0))


def test_remote_prefill_that_leaves_before_the_engine_saw_it_never_was() -> None:
    one, _, _ = remote_prefills()
    one.withdraw(one.enter(prefill_request(1)))
    assert (one.take_new(), one.take_withdrawn(), one.num_remote_prefills) == ([], [], 0)


def test_remote_prefill_that_leaves_while_it_runs_is_withdrawn_and_what_came_of_it_released() -> None:
    one, released, woken = remote_prefills()
    prefill = one.enter(prefill_request(1))
    one.take_new()
    one.withdraw(prefill)
    assert woken == ["wake", "wake"]
    assert one.take_withdrawn() == [prefill.request.request_id]
    one.ended(prefill.request.request_id, PARAMS, "")
    assert released == ["t"]


def test_remote_prefill_that_leaves_when_all_is_done_has_its_blocks_released() -> None:
    one, released, _ = remote_prefills()
    prefill = one.enter(prefill_request(1))
    one.take_new()
    one.ended(prefill.request.request_id, PARAMS, "")
    one.withdraw(prefill)
    assert (released, one.take_withdrawn()) == (["t"], [])


def test_nobody_waits_for_an_engine_that_ends() -> None:
    one, _, _ = remote_prefills()
    prefill = one.enter(prefill_request(1))
    one.close()
    one.close()
    assert prefill.wait(0.0)
    assert prefill.error == "this engine ends"
    with pytest.raises(TransferError):
        one.enter(prefill_request(2))


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock()


@pytest.fixture
def holds(clock: SimulatedClock) -> Holds:
    return Holds(clock, lease_s=10.0, max_hold_s=25.0, max_bytes=100)


def add(holds: Holds, transfer_id: int, num_bytes: int = 40) -> str:
    name = f"hold {transfer_id}"
    assert holds.add(transfer_id, name, {b"h": transfer_id}, num_bytes=num_bytes)
    return name


def nothing() -> None:
    return None


def test_hold_ends_with_its_lease(holds: Holds, clock: SimulatedClock) -> None:
    add(holds, 7)
    clock.advance(9.9)
    assert holds.take_free() == ()
    clock.advance(0.2)
    assert holds.take_free() == (7,)
    assert holds.take_free() == ()
    assert (holds.num_holds, holds.num_bytes, holds.ends) == (0, 0, {"expired": 1})


def test_released_hold_is_free_at_once_and_released_once(holds: Holds) -> None:
    name = add(holds, 7)
    assert holds.release(name)
    assert not holds.release(name)
    assert holds.take_free() == (7,)
    assert holds.ends == {"released": 1}


def test_renewal_begins_a_lease_anew_but_not_for_ever(holds: Holds, clock: SimulatedClock) -> None:
    name = add(holds, 7)
    for _ in range(4):
        clock.advance(6.0)
        assert holds.take_free() == ()
        assert holds.renew(name)
    clock.advance(1.1)
    assert holds.take_free() == (7,)
    assert not holds.renew(name)


def test_blocks_that_somebody_reads_stay_until_it_is_done(holds: Holds, clock: SimulatedClock) -> None:
    name = add(holds, 7)
    hold = holds.open(name, nothing)
    assert hold.index == {b"h": 7}
    clock.advance(12.0)
    assert holds.take_free() == ()
    holds.release(name)
    assert holds.take_free() == ()
    holds.close(hold, nothing)
    assert holds.take_free() == (7,)


def test_reader_that_takes_too_long_is_cut(holds: Holds, clock: SimulatedClock) -> None:
    name, cuts = add(holds, 7), []

    def cut() -> None:
        cuts.append(name)

    hold = holds.open(name, cut)
    clock.advance(25.1)
    assert holds.take_free() == ()
    assert cuts == [name]
    holds.close(hold, cut)
    assert holds.take_free() == (7,)


def test_two_readers_end_one_after_the_other(holds: Holds) -> None:
    name = add(holds, 7)
    first = holds.open(name, nothing)
    second = holds.open(name, nothing)
    holds.close(first, nothing)
    holds.release(name)
    assert holds.take_free() == ()
    holds.close(second, nothing)
    assert holds.take_free() == (7,)


def test_no_more_bytes_are_held_than_may_be(holds: Holds) -> None:
    add(holds, 1)
    add(holds, 2)
    assert not holds.add(3, "too many", {}, num_bytes=21)
    assert (holds.num_bytes, holds.ends) == (80, {"refused": 1})
    holds.release("hold 1")
    holds.take_free()
    add(holds, 4, num_bytes=60)


@pytest.mark.parametrize("ending", ["never held", "released", "expired"])
def test_hold_that_is_over_is_lost(holds: Holds, clock: SimulatedClock, ending: str) -> None:
    name = add(holds, 7)
    if ending == "released":
        holds.release(name)
    elif ending == "expired":
        clock.advance(11)
        holds.take_free()
    with pytest.raises(TransferError) as caught:
        holds.open("no such hold" if ending == "never held" else name, nothing)
    assert caught.value.cause == "lost"
