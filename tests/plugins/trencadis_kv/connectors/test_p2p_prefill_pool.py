from __future__ import annotations

import logging
import threading

import attrs
import pytest

from support.eventually import eventually
from support.kv.p2p_ends import Producer, producing
from trencadis.errors import TransferError
from trencadis.records import TransferCause
from trencadis_kv.connectors.p2p.prefill_pool import PrefillEngine, PrefillPool
from trencadis_kv.wire.stream_messages import State

STATE = State(accepts=True, num_remote_prefills=1, num_tokens=100, tokens_per_s=1000.0)


def registry_of(producer: Producer) -> PrefillPool:
    return PrefillPool([f"127.0.0.1:{producer.node.server.port}"], connect_timeout_s=1.0, heartbeat_s=0.01)


def test_engine_that_answers_is_ready_and_says_what_it_has_to_do() -> None:
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
        producer.node.remote_prefills.accepts = False
        eventually(lambda: registry.ready() == [])
        producer.node.remote_prefills.accepts = True
        eventually(lambda: registry.ready() == [engine])
        registry.close()
        registry.close()


def test_engine_that_dies_is_left_alone_and_one_that_comes_back_is_found() -> None:
    with producing() as producer:
        registry = registry_of(producer)
        registry.start(producer.me)
        eventually(lambda: len(registry.ready()) == 1)
        port = producer.node.server.port
    eventually(lambda: registry.ready() == [])
    with producing(port=port):
        eventually(lambda: len(registry.ready()) == 1)
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
