from __future__ import annotations

import logging
import sys
import threading
import time

import pytest

from support.kv.nixl_peer import NixlPeer, small_config
from trencadis.errors import ConfigError, TransferError
from trencadis.records import TransferCause
from trencadis_kv.connectors.nixl.agent import NixlAgent, ProgressThread, check_package, tell_ucx


def test_function_runs_while_somebody_needs_it_and_not_otherwise():
    calls = threading.Semaphore(0)
    pump = ProgressThread(calls.release)
    assert not calls.acquire(timeout=0.02)
    pump.begin()
    pump.begin()
    for _ in range(3):
        assert calls.acquire(timeout=5.0)
    pump.end()
    while calls.acquire(blocking=False):
        pass
    assert calls.acquire(timeout=5.0), "one still needs it"
    pump.end()
    while calls.acquire(timeout=0.05):
        pass
    assert not calls.acquire(timeout=0.05)
    pump.begin()
    assert calls.acquire(timeout=5.0)
    pump.close()


def test_nothing_runs_after_close():
    calls = threading.Semaphore(0)
    pump = ProgressThread(calls.release)
    pump.begin()
    assert calls.acquire(timeout=5.0)
    pump.close()
    pump.close()
    while calls.acquire(blocking=False):
        pass
    assert not calls.acquire(timeout=0.02)
    pump.begin()
    assert not calls.acquire(timeout=0.02)


BLOCK_BYTES = 8 << 20


@pytest.fixture
def agent():
    pytest.importorskip("nixl_cu12", reason='nixl is not installed: pip install "trencadis[nixl]"')
    tell_ucx(small_config())
    one = NixlAgent(check_package(), num_pieces=4, num_rows=1, block_bytes=BLOCK_BYTES)
    yield one
    one.close()


def target_of(peer):
    import msgspec

    metadata, addresses, *_ = msgspec.msgpack.decode(bytes.fromhex(peer.read()))
    return {"metadata": metadata, "address": addresses[0]}


def write(agent, piece, target, *, timeout_s=10.0, is_gone=lambda: False):
    agent.write(piece, BLOCK_BYTES, **target, timeout_s=timeout_s, is_gone=is_gone)


def test_missing_package_is_named_with_the_extra(monkeypatch):
    for name in ("nixl_cu12", "nixl_cu13", "nixl"):
        monkeypatch.setitem(sys.modules, f"{name}._api", None)
    with pytest.raises(ConfigError, match="needs the package nixl") as caught:
        check_package()
    assert "trencadis[nixl]" in caught.value.hint


def test_environment_that_says_something_already_is_left_alone(monkeypatch):
    for name in ("UCX_TLS", "UCX_MODULES", "UCX_NET_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("UCX_TLS", "rc")
    tell_ucx(small_config())
    import os

    assert (os.environ["UCX_TLS"], os.environ["UCX_MODULES"], os.environ["UCX_NET_DEVICES"]) == ("rc", "^ib", "lo")


def test_library_says_nothing_on_the_standard_output(agent, capfd):
    NixlAgent(check_package(), num_pieces=1, num_rows=1, block_bytes=4096).close()
    assert capfd.readouterr().out == ""
    assert logging.getLogger("nixl").propagate


def test_what_is_written_is_there_when_the_call_returns(agent):
    with NixlPeer("lend", BLOCK_BYTES) as peer:
        target, (piece,) = target_of(peer), agent.take(1)
        for value in (1, 3):
            agent.rows(piece)[:] = value
            write(agent, piece, target)
            peer.say()
            assert int(peer.read()) == value * BLOCK_BYTES


def test_peer_that_stands_still_costs_the_deadline_and_the_memory_is_kept_until_the_write_has_ended(agent):
    with NixlPeer("lend", BLOCK_BYTES) as peer:
        target = target_of(peer)
        first, second = agent.take(2)
        write(agent, first, target)
        peer.stand_still()
        start_s = time.monotonic()
        with pytest.raises(TransferError) as caught:
            write(agent, second, target, timeout_s=0.2)
        assert caught.value.cause == TransferCause.DEADLINE
        assert time.monotonic() - start_s < 60.0
        agent.give_back([first])
        assert agent.take(4) == [], "memory that is still read was given away"
        peer.go_on()
        until_s, taken = time.monotonic() + 20.0, []
        while not taken and time.monotonic() < until_s:
            taken = agent.take(4)
            time.sleep(0.001)
        assert sorted(taken) == [0, 1, 2, 3]


def test_write_for_somebody_who_has_gone_is_not_waited_for(agent):
    with NixlPeer("lend", BLOCK_BYTES) as peer:
        target, pieces = target_of(peer), agent.take(2)
        write(agent, pieces[0], target)
        peer.stand_still()
        with pytest.raises(TransferError) as caught:
            write(agent, pieces[1], target, timeout_s=60.0, is_gone=lambda: True)
        assert caught.value.cause == TransferCause.CANCELLED


@pytest.mark.slow
def test_peer_that_was_killed_is_unreachable_and_its_memory_is_free(agent):
    with NixlPeer("lend", BLOCK_BYTES) as peer:
        target, (piece,) = target_of(peer), agent.take(1)
        write(agent, piece, target)
        peer.process.kill()
        peer.process.wait()
        with pytest.raises(TransferError) as caught:
            write(agent, piece, target, timeout_s=20.0)
        assert caught.value.cause == TransferCause.UNREACHABLE
        assert len(agent.take(4)) == 4
    with NixlPeer("lend", BLOCK_BYTES) as peer:
        agent.rows(0)[:] = 2
        write(agent, 0, target_of(peer))
        peer.say()
        assert int(peer.read()) == 2 * BLOCK_BYTES, "after one peer's death another one cannot be written to"
