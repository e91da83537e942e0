from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from support.kv.p2p_ends import p2p_config
from trencadis.clock import SimulatedClock
from trencadis.records import ConnectorReport, Request
from trencadis_kv.connectors.p2p.connector import P2PScheduler
from trencadis_kv.connectors.p2p.node import Node
from trencadis_kv.connectors.p2p.params import RemotePrefix, handover_params
from trencadis_kv.connectors.p2p.worker import Work
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


def test_misspelt_parameter_is_warned_of(scheduler: P2PScheduler, caplog: pytest.LogCaptureFixture) -> None:
    assert lookup(scheduler, {"do_remote_prefil": True}) == (0, -1)
    assert "'do_remote_prefill'" in caplog.text


def test_what_is_there_already_is_a_miss(scheduler: P2PScheduler) -> None:
    assert lookup(scheduler, handover_params(PREFIX, blocks=[]), num_local_tokens=16) == (0, -1)
    assert lookup(scheduler, handover_params(PREFIX, blocks=[]), num_local_tokens=12)[0] == 16


def test_message_has_what_is_to_be_pulled_and_what_is_not_wanted(scheduler: P2PScheduler) -> None:
    _, transfer_id = lookup(scheduler, handover_params(PREFIX, blocks=[]))
    assert scheduler.take_message() == b""
    scheduler.on_allocated(transfer_id, blocks=[7, 3], block_hashes=HASHES[:2])
    scheduler.on_cancelled(99)
    work = msgspec.msgpack.decode(scheduler.take_message(), type=Work)
    (load,) = work.loads
    assert (load.transfer_id, load.engine, load.name, load.host, load.port) == (transfer_id, "e", "t", "127.0.0.1", 1)
    assert (load.blocks, load.hashes, work.cancels) == ([7, 3], HASHES[:2], [99])
    assert scheduler.take_message() == b""


def test_prefill_is_held_and_its_parameters_lead_back_here(scheduler: P2PScheduler) -> None:
    request = request_of({"do_remote_decode": True})
    scheduler.lookup(request, block_hashes=HASHES, num_local_tokens=0)
    transfer_id = scheduler.on_finished(request, blocks=[4, 8, 2, 1, 0, 9])
    assert transfer_id is not None
    params = scheduler.finished_params(request)
    assert scheduler.finished_params(request) is None
    prefix = RemotePrefix.of(params)
    assert prefix is not None
    assert (prefix.num_tokens, prefix.host, params["remote_block_ids"]) == (20, "127.0.0.1", [4, 8, 2, 1, 0])
    hold = scheduler._node.holds.open(prefix.hold_id, lambda: None)
    assert hold.index == dict(zip(HASHES, [4, 8, 2, 1, 0], strict=True))


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


def test_memory_of_hits_that_were_not_used_is_bounded(scheduler: P2PScheduler) -> None:
    for number in range(5000):
        request = request_of(handover_params(PREFIX, blocks=[]), name=f"r {number}")
        found = scheduler.lookup(request, block_hashes=HASHES, num_local_tokens=0)
        scheduler.on_unused(found.transfer_id)
    assert len(scheduler._unused) <= 4096
    assert not scheduler._found


def test_rejected_request_with_odd_parameters_harms_nobody(scheduler: P2PScheduler) -> None:
    for params in ({}, {"do_remote_prefill": True}, {**handover_params(PREFIX, blocks=[]), "remote_host": "192.0.2.1"}):
        scheduler.on_rejected(params)
    assert scheduler._node.background_calls._thread is None
    assert 'trencadis_kv_held_bytes{connector="p2p"} 0.0' in scheduler.metrics()
