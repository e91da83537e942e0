from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from support.kv.p2p_ends import p2p_config
from trencadis.clock import SimulatedClock
from trencadis.errors import TransferError
from trencadis.records import ConnectorReport, Request, TransferCause
from trencadis_kv.connectors.p2p.connector import P2PScheduler
from trencadis_kv.connectors.p2p.node import Node
from trencadis_kv.connectors.p2p.params import RemotePrefix, handover_params, wants_hold
from trencadis_kv.connectors.p2p.remote_prefills import Holds, RemotePrefills
from trencadis_kv.wire.stream_messages import PrefillRequest
from trencadis_testing.connector_harness import hashes_of
from trencadis_testing.fake_pool import FakeKVCache

HASHES = hashes_of(range(5))


PREFIX = RemotePrefix(engine="e", hold_id="t", host="127.0.0.1", port=1, num_tokens=16, lease_s=7.5)


@pytest.fixture
def scheduler() -> Iterator[P2PScheduler]:
    node = Node(p2p_config(), clock=SimulatedClock(), model="m")
    one = P2PScheduler(node)
    one.on_ready(FakeKVCache([], block_size=4).layout)
    yield one
    one.close()


def request_of(params: dict[str, Any] | None, name: str = "r") -> Request:
    return Request(request_id=name, prompt_token_ids=tuple(range(1, 22)), transfer_params=params)


def lookup(scheduler: P2PScheduler, params: dict[str, Any] | None, *, num_local_tokens: int = 0) -> tuple[int, int]:
    found = scheduler.lookup(request_of(params), block_hashes=HASHES, num_local_tokens=num_local_tokens)
    assert not found.pending
    return found.num_tokens, found.transfer_id


def test_hit_is_what_the_parameters_say_in_whole_blocks(scheduler: P2PScheduler) -> None:
    assert lookup(scheduler, handover_params(PREFIX, blocks=[])) == (16, 0)
    assert lookup(scheduler, {**handover_params(PREFIX, blocks=[]), "remote_num_tokens": 15})[0] == 12
    assert lookup(scheduler, {**handover_params(PREFIX, blocks=[]), "remote_num_tokens": 10**9})[0] == 20
    assert lookup(scheduler, None) == (0, -1)
    assert lookup(scheduler, {"remote_num_tokens": 16}) == (0, -1)


def test_what_is_there_already_is_a_miss(scheduler: P2PScheduler) -> None:
    assert lookup(scheduler, handover_params(PREFIX, blocks=[]), num_local_tokens=16) == (0, -1)
    assert lookup(scheduler, handover_params(PREFIX, blocks=[]), num_local_tokens=12)[0] == 16


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": False}])
def test_others_are_not_held(scheduler: P2PScheduler, params: dict[str, Any] | None) -> None:
    request = request_of(params)
    scheduler.lookup(request, block_hashes=HASHES, num_local_tokens=0)
    assert scheduler.on_finished(request, blocks=[1, 2, 3, 4, 5]) is None
    assert scheduler.finished_params(request) is None


def test_prefill_that_was_never_looked_up_is_not_held(scheduler: P2PScheduler) -> None:
    """Nobody knows what is in its blocks."""
    assert scheduler.on_finished(request_of({"do_remote_decode": True}), blocks=[1, 2]) is None


def test_memory_of_requests_that_never_come_back_is_bounded(scheduler: P2PScheduler) -> None:
    for number in range(5000):
        request = request_of({"do_remote_decode": True, **handover_params(PREFIX, blocks=[])}, name=f"r {number}")
        scheduler.lookup(request, block_hashes=HASHES[:1], num_local_tokens=0)
    scheduler.on_computed(blocks=[1], block_hashes=HASHES[:1])
    scheduler.on_report(ConnectorReport())
    assert len(scheduler._hashes) <= 4096
    assert len(scheduler._found) <= 4096


def test_hit_that_is_not_used_is_forgotten_and_given_back_when_its_request_ends(scheduler: P2PScheduler) -> None:
    """It may be looked up again; who holds the prefix waits as long, and not for the end of its lease."""
    released: list[RemotePrefix] = []
    scheduler._node.background_calls.release = released.append  # type: ignore[method-assign]
    params = handover_params(PREFIX, blocks=[])
    _, first = lookup(scheduler, params)
    scheduler.on_unused(first)
    assert not scheduler._found
    assert released == []
    num_tokens, second = lookup(scheduler, params)
    assert (num_tokens, second != first) == (16, True)
    scheduler.on_unused(second)
    scheduler.on_finished(request_of(params), blocks=[])
    assert [(prefix.engine, prefix.hold_id) for prefix in released] == [("e", "t")]
    scheduler.on_finished(request_of(params), blocks=[])
    assert len(released) == 1


def test_hit_that_is_used_in_the_end_is_not_given_back_twice(scheduler: P2PScheduler) -> None:
    released: list[RemotePrefix] = []
    scheduler._node.background_calls.release = released.append  # type: ignore[method-assign]
    params = handover_params(PREFIX, blocks=[])
    scheduler.on_unused(lookup(scheduler, params)[1])
    scheduler.on_allocated(lookup(scheduler, params)[1], blocks=[1, 2], block_hashes=HASHES[:2])
    scheduler.on_finished(request_of(params), blocks=[1, 2])
    assert released == [], "the pull does that"


def test_rejected_request_with_odd_parameters_harms_nobody(scheduler: P2PScheduler) -> None:
    for params in ({}, {"do_remote_prefill": True}, {**handover_params(PREFIX, blocks=[]), "remote_host": "192.0.2.1"}):
        scheduler.on_rejected(params)
    assert scheduler._node.background_calls._thread is None
    assert 'trencadis_kv_held_bytes{connector="p2p"} 0.0' in scheduler.metrics()


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


def test_hold_ends_with_its_lease_or_when_it_is_released_once(holds: Holds, clock: SimulatedClock) -> None:
    add(holds, 7)
    name = add(holds, 8)
    assert [holds.release(name), holds.release(name)] == [True, False]
    assert holds.take_free() == (8,)
    clock.advance(9.9)
    assert holds.take_free() == ()
    clock.advance(0.2)
    assert [holds.take_free(), holds.take_free()] == [(7,), ()]
    assert (holds.num_holds, holds.num_bytes, holds.ends) == (0, 0, {"expired": 1, "released": 1})


def test_renewal_begins_a_lease_anew_but_not_for_ever(holds: Holds, clock: SimulatedClock) -> None:
    name = add(holds, 7)
    for _ in range(4):
        clock.advance(6.0)
        assert holds.take_free() == ()
        assert holds.renew(name)
    clock.advance(1.1)
    assert holds.take_free() == (7,)
    assert not holds.renew(name)


def test_blocks_that_somebody_reads_stay_until_the_last_one_is_done(holds: Holds, clock: SimulatedClock) -> None:
    name = add(holds, 7)
    first, second = holds.open(name, nothing), holds.open(name, nothing)
    assert first.index == {b"h": 7}
    clock.advance(12.0)
    assert holds.take_free() == ()
    holds.close(first, nothing)
    holds.release(name)
    assert holds.take_free() == ()
    holds.close(second, nothing)
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
