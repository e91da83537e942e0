"""Other engines, as one engine sees them."""

from __future__ import annotations

import logging
import threading

import attrs
import pytest

from support.eventually import eventually
from support.kv.p2p_ends import Producer, producing
from trencadis.clock import SimulatedClock
from trencadis.errors import TransferError
from trencadis.records import TransferCause
from trencadis_kv.connectors.p2p.params import RemotePrefix
from trencadis_kv.connectors.p2p.peers import BackgroundCalls, Peers, PrefillEngine, PrefillPool
from trencadis_kv.wire.stream_messages import State

PREFIX = RemotePrefix(engine="e", hold_id="t", host="10.0.0.1", port=5, num_tokens=32, lease_s=7.5)


def peers_of(clock: SimulatedClock | None = None) -> Peers:
    named = ("10.0.0.0/8:5", "[fd00::/8]:5", "Node-1.example:5", "[::1]:*", "10.0.0.9:6")
    return Peers(named, clock or SimulatedClock(), retry_s=5.0)


def test_only_named_addresses_are_pulled_from() -> None:
    named = [("10.1.2.3", 5), ("10.0.0.9", 6), ("fd00::5", 5), ("node-1.example", 5), ("NODE-1.example", 5)]
    named += [("::1", port) for port in (1, 65535)]
    others = [("10.1.2.3", 6), ("11.1.2.3", 5), ("fd00::5", 22), ("fe00::5", 5), ("node-1.example", 0), ("", 5)]
    others += [(host, 5) for host in ("node-2.example", "10.0.0.1.evil.example", "127.0.0.1")]
    peers = peers_of()
    assert [one for one in named + others if peers.allows(*one)] == named


def test_strangers_are_mentioned_once_and_fill_neither_memory_nor_the_log(caplog: pytest.LogCaptureFixture) -> None:
    peers = peers_of()
    for _ in range(3):
        assert not peers.allows("evil\nINFO all is well", 5)
    (record,) = caplog.records
    assert "\n" not in record.getMessage()
    for number in range(3000):
        assert not peers.allows("127.0.0.1", 1 + number)
    assert len(caplog.records) == 64
    assert "No more such addresses are logged." in caplog.records[-1].getMessage()


@pytest.mark.parametrize(
    ("cause", "for_s"),
    [("unreachable", 5.0), ("deadline", 5.0), ("incompatible", 1e6), ("lost", 0), ("corrupt", 0), ("raised", 0)],
)
@pytest.mark.representatives(6)
def test_engine_is_left_alone_for_a_while_if_it_cannot_be_reached_and_for_good_if_it_is_of_another_kind(
    cause: str, for_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    clock = SimulatedClock()
    peers = peers_of(clock)
    for _ in range(2):
        peers.failed(PREFIX, TransferError("gone", cause=cause))
    assert (peers.is_down(PREFIX), peers.num_down) == (for_s > 0, int(for_s > 0))
    assert not peers.is_down(attrs.evolve(PREFIX, engine="its successor on the same port"))
    clock.advance(for_s + 0.1 if for_s < 1e6 else for_s)
    assert peers.is_down(PREFIX) == (cause == "incompatible")
    assert cause != "incompatible" or len(caplog.records) == 1


def background_calls() -> tuple[BackgroundCalls, Peers]:
    peers = Peers(("127.0.0.0/8:*",), SimulatedClock(), retry_s=5)
    return BackgroundCalls(peers, connect_timeout_s=2.0), peers


def test_release_and_renewal_reach_the_producer() -> None:
    calls, _ = background_calls()
    with producing() as producer:
        calls.identity = producer.me
        producer.clock.advance(20)
        calls.renew(producer.prefix)
        eventually(lambda: producer.node.holds._by_name["held"].expires_s > 31)
        calls.release(producer.prefix)
        eventually(lambda: producer.node.holds.ends == {"released": 1})
    calls.close()
    calls.close()


def test_first_background_calls_many_threads_start_one_thread_and_closing_meanwhile_is_fine() -> None:
    prefix = RemotePrefix(engine="x", hold_id="t", host="127.0.0.1", port=9, num_tokens=1, lease_s=1.0)
    for _ in range(50):
        calls, _ = background_calls()
        together = threading.Barrier(4)

        def give_back(calls: BackgroundCalls = calls, together: threading.Barrier = together) -> None:
            together.wait(60)
            calls.release(prefix)

        threads = [threading.Thread(target=give_back) for _ in range(3)]
        for thread in threads:
            thread.start()
        together.wait(60)
        calls.close()
        for thread in threads:
            thread.join(60)
    assert not [one for one in threading.enumerate() if one.name == "trencadis-p2p-calls"]


def test_nothing_runs_before_there_is_an_errand_and_too_many_are_dropped() -> None:
    calls, _ = background_calls()
    assert calls._thread is None
    calls.close()
    with producing() as producer:
        calls._thread = threading.current_thread()  # nobody works
        for _ in range(3000):
            calls.release(producer.prefix)
    assert calls._todo.qsize() == 1024


STATE = State(accepts=True, num_remote_prefills=1, num_tokens=100, tokens_per_s=1000.0)


def registry_of(producer: Producer) -> PrefillPool:
    return PrefillPool([f"127.0.0.1:{producer.node.server.port}"], connect_timeout_s=1.0, heartbeat_s=0.01)


def test_engine_that_answers_is_ready_says_what_it_has_to_do_and_is_found_again_when_it_comes_back() -> None:
    with producing() as producer:
        registry = registry_of(producer)
        assert registry.ready() == []
        registry.start(producer.me)
        eventually(lambda: len(registry.ready()) == 1)
        (engine,) = registry.ready()
        assert engine.state == State(accepts=True, num_remote_prefills=0, num_tokens=0, tokens_per_s=0.0)
        assert 0 < engine.rtt_s < 60
        producer.node.cost.computed(num_tokens=500, seconds=0.5)
        eventually(lambda: engine.state is not None and engine.state.tokens_per_s == pytest.approx(1000))
        for accepts in (False, True):
            producer.node.remote_prefills.accepts = accepts
            eventually(lambda accepts=accepts: bool(registry.ready()) == accepts)  # type: ignore[misc]
        port = producer.node.server.port
    eventually(lambda: registry.ready() == [])
    with producing(port=port):
        eventually(lambda: len(registry.ready()) == 1)
        registry.close()
        registry.close()


def test_engine_of_another_model_gets_no_prompts_and_the_log_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    with producing() as producer, caplog.at_level(logging.ERROR, "trencadis.kv.p2p"):
        registry = registry_of(producer)
        registry.start(attrs.evolve(producer.me, compat=b"?" * 16))
        eventually(lambda: "of another kind" in caplog.text)
        threading.Event().wait(0.05)
        assert registry.ready() == []
        registry.close()
    assert caplog.text.count("No prompts go to the engine") == 1


def test_prompts_that_were_just_sent_count_until_the_engine_counts_them() -> None:
    engine = PrefillEngine("127.0.0.1:1")
    assert engine.num_waiting_tokens == 0
    engine.update(STATE, 0.01)
    engine.num_sent_tokens += 50
    assert engine.num_waiting_tokens == 150
    engine.update(STATE, 0.02)
    assert (engine.num_waiting_tokens, engine.rtt_s) == (100, 0.02)
    engine.lost(TransferError("gone", cause=TransferCause.UNREACHABLE))
    assert engine.state is None


def test_prompts_that_begin_alike_prefer_the_same_engine_also_when_others_leave() -> None:
    engines = [PrefillEngine(f"10.0.0.{i}:7400") for i in range(4)]
    keys = [bytes([i]) * 32 for i in range(100)]

    def favourite(key: bytes, of: list[PrefillEngine]) -> PrefillEngine:
        return max(of, key=lambda engine: engine.affinity(key))

    before = [favourite(key, engines) for key in keys]
    assert all(10 <= sum(one is engine for one in before) <= 45 for engine in engines)
    after = [favourite(key, engines[1:]) for key in keys]
    assert all(new is old for new, old in zip(after, before, strict=True) if old is not engines[0])
    assert all(0 <= engine.affinity(key) < 1 for engine in engines for key in keys)
