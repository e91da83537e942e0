"""Decode first, in one process: engines on fake backends and real sockets, stepped by hand."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import attrs
import pytest

from support.eventually import eventually
from support.kv.engine_pairs import Station, prompt_of, true_text
from support.kv.p2p_ends import Producer, producing
from trencadis.records import FinishedSequence, Request, SamplingParams, TransferCause
from trencadis_kv.connectors.p2p.delegation import DelegatedPrefill
from trencadis_kv.connectors.p2p.params import RemotePrefix, handover_params
from trencadis_kv.connectors.p2p.peers import PrefillEngine
from trencadis_kv.wire.stream_messages import State

REQUEST = Request(
    request_id="r",
    prompt_token_ids=range(1, 20),
    tenant="key/user",
    cache_salt="s",
    priority=-2,
    weight=3.0,
)


class Sent:
    """A delegated prefill on its thread."""

    def __init__(self, producer: Producer, *, timeout_s: float = 5.0, port: int = 0) -> None:
        engine = PrefillEngine(f"127.0.0.1:{port or producer.node.server.port}")
        self.given_back: list[RemotePrefix] = []
        producer.node.background_calls.release = self.given_back.append  # type: ignore[method-assign]
        self.prefill = DelegatedPrefill(
            engine,
            REQUEST,
            producer.node,
            timeout_s=timeout_s,
        )
        self.thread = threading.Thread(target=self.prefill.run)
        self.thread.start()

    def result(self) -> RemotePrefix | TransferCause | None:
        self.thread.join(60)
        assert self.prefill.is_done
        error = self.prefill.error
        return self.prefill.prefix if error is None else error.cause


def end(producer: Producer, error: str = "") -> None:
    """Let the one prefill end, as an engine would."""
    (request,) = producer.node.remote_prefills.take_new()
    producer.node.remote_prefills.ended(
        request.request_id, None if error else handover_params(producer.prefix, blocks=[]), error
    )


def test_offer_says_where_the_blocks_are_of_the_engine_that_was_asked() -> None:
    with producing() as producer:
        sent = Sent(producer)
        eventually(lambda: producer.node.remote_prefills.num_remote_prefills == 1)
        assert not sent.prefill.is_done
        (prefill,) = producer.node.remote_prefills._remote_prefills.values()
        for name in ("prompt_token_ids", "tenant", "cache_salt", "priority", "weight"):
            assert getattr(prefill.request, name) == getattr(REQUEST, name)
        end(producer)
        assert sent.result() == producer.prefix
        assert sent.given_back == []


def test_refusals_and_failures_come_with_their_cause() -> None:
    with producing() as producer:
        sent = Sent(producer)
        eventually(lambda: producer.node.remote_prefills.num_remote_prefills == 1)
        end(producer, "the prompt is too long")
        assert sent.result() == TransferCause.FULL
        assert "the prompt is too long" in str(sent.prefill.error)
        producer.node.remote_prefills.accepts = False
        assert Sent(producer).result() == TransferCause.FULL
        producer.node.remote_prefills.accepts = True
        assert Sent(producer, timeout_s=0.05).result() == TransferCause.DEADLINE
        eventually(lambda: producer.node.remote_prefills.num_remote_prefills == 0)
        port = producer.node.server.port
    assert Sent(producer, port=port).result() == TransferCause.UNREACHABLE


def test_withdrawal_before_during_and_after_leaves_nothing_behind() -> None:
    with producing() as producer:
        before = Sent.__new__(Sent)
        before.given_back = []
        before.prefill = DelegatedPrefill(
            PrefillEngine(f"127.0.0.1:{producer.node.server.port}"),
            REQUEST,
            producer.node,
            timeout_s=5.0,
        )
        before.prefill.withdraw()
        before.prefill.run()
        assert before.prefill.is_done
        assert producer.node.remote_prefills.num_remote_prefills == 0

        during = Sent(producer)
        eventually(lambda: producer.node.remote_prefills.num_remote_prefills == 1)
        during.prefill.withdraw()
        assert isinstance(during.result(), TransferCause)
        eventually(lambda: producer.node.remote_prefills.num_remote_prefills == 0)

        after = Sent(producer)
        eventually(lambda: producer.node.remote_prefills.num_remote_prefills == 1)
        end(producer)
        assert after.result() == producer.prefix
        after.prefill.withdraw()
        assert after.given_back == [producer.prefix]


NAME = "127.0.0.1:{}"


@contextlib.contextmanager
def decoder(*ports: int, **config: Any) -> Iterator[Station]:
    """Have an engine that lets engines at these ports compute its prompts; it knows all of them."""
    given = {"min_remote_tokens": 8, "heartbeat_s": 0.02, **config}
    with Station(prefill_engines=tuple(map(NAME.format, ports)), **given) as one:
        eventually(lambda: len(one.node.prefill_pool.ready()) == len(ports))
        yield one


def serve(one: Station, prompt: tuple[int, ...], *others: Station) -> FinishedSequence:
    name = one.add(prompt, max_tokens=5)
    eventually(lambda: name in one.ends, of=(one, *others))
    return one.ends[name]


def port_of(station: Station) -> int:
    port: int = station.node.server.port
    return port


@pytest.fixture
def prefiller() -> Iterator[Station]:
    with Station() as one:
        yield one


@pytest.mark.parametrize("has_local", [False, True])
def test_hits_are_what_one_of_both_engines_had_before(prefiller: Station, has_local: bool) -> None:
    prompt = prompt_of(1, 21)
    prefiller.serve(prompt[:13], max_tokens=2)
    with decoder(port_of(prefiller)) as one:
        if has_local:
            one.serve(prompt[:7], max_tokens=2)
        end = serve(one, prompt, prefiller)
        assert (one.num_found(end), end.num_cached_tokens) == (20, 12)
        assert one.engine.totals.num_prompt_tokens_cached == 12
        assert one.count("delegated_prefills", result="served") == 1


def test_short_prompts_those_that_are_here_already_and_those_that_were_sent_here_stay(prefiller: Station) -> None:
    """Two engines that compute prompts for each other do not play ball with them."""
    with decoder(port_of(prefiller)) as one:
        assert one.num_found(serve(one, prompt_of(2, 7))) == 0
        prompt = prompt_of(3, 21)
        serve(one, prompt, prefiller)
        assert one.num_found(serve(one, prompt)) == 20
        assert one.prefill(prompt_of(4, 21))["remote_num_tokens"] == 20
        assert prefiller.engine.totals.num_finished == 1


def test_engine_that_is_not_there_any_more_is_not_waited_for() -> None:
    prompt = prompt_of(8, 21)
    with Station() as first, decoder(port_of(first), heartbeat_s=60.0) as one:
        first.close()
        assert serve(one, prompt).token_ids.tolist() == true_text(prompt, 5)
        assert one.count("delegated_prefills", result="failed") == 1
        assert one.node.prefill_pool.ready() == [], "it is left alone until it answers"
        assert one.num_found(serve(one, prompt_of(9, 21))) == 0
        assert one.count("delegated_prefills", result="failed") == 1


@pytest.mark.parametrize("num_full", [1, 2])
def test_another_engine_is_asked_once_and_then_this_one_computes(prefiller: Station, num_full: int) -> None:
    with contextlib.ExitStack() as stack:
        full = [stack.enter_context(Station(max_remote_prefills=0)) for _ in range(num_full)]
        ports = [port_of(one) for one in (*full, prefiller)]
        one = stack.enter_context(decoder(*ports))
        for engine in one.node.prefill_pool.engines:
            engine.affinity = lambda _, port=engine.port: float(-ports.index(port))
        prompt = prompt_of(10, 21)
        end = serve(one, prompt, prefiller)
        assert (end.token_ids.tolist(), one.num_found(end)) == (true_text(prompt, 5), 20 if num_full == 1 else 0)
        assert one.count("delegated_prefills", result="failed") == num_full
        assert one.count("delegated_prefills", result="served") == (num_full == 1)


@pytest.mark.parametrize("is_slow", [False, True])
def test_client_that_leaves_takes_its_prompt_back_and_so_does_who_waits_no_longer(
    prefiller: Station, is_slow: bool
) -> None:
    prompt = prompt_of(13, 21)
    with decoder(port_of(prefiller), prefill_timeout_s=0.2 if is_slow else 60.0) as one:
        name = one.add(prompt, max_tokens=5)
        one.step()
        eventually(lambda: prefiller.node.remote_prefills.num_remote_prefills == 1)
        if is_slow:
            eventually(lambda: name in one.ends, of=(one,))
            assert one.ends[name].token_ids.tolist() == true_text(prompt, 5)
            assert one.count("transfer_failures", cause="deadline") == 1
        else:
            one.engine.abort(name)
        eventually(
            lambda: not prefiller.node.remote_prefills.num_remote_prefills and not prefiller.num_used_blocks,
            of=(one, prefiller),
        )
        assert prefiller.node.holds.num_holds == 0
        assert one.count("delegated_prefills", result="withdrawn") == (not is_slow)


def test_flood_of_prompts_is_bounded_on_both_sides() -> None:
    prompts = [prompt_of(seed, 21) for seed in range(20, 32)]
    with Station(max_remote_prefills=2) as few, decoder(port_of(few), max_delegated_prefills=4) as one:
        names = [one.add(prompt, max_tokens=3) for prompt in prompts]
        most = 0

        def are_done() -> bool:
            nonlocal most
            most = max(most, few.node.remote_prefills.num_remote_prefills)
            assert len(one.pair.scheduler._delegation._delegated) <= 4  # type: ignore[attr-defined]
            return all(name in one.ends for name in names)

        eventually(are_done, of=(one, few))
        assert [one.ends[name].token_ids.tolist() for name in names] == [true_text(prompt, 3) for prompt in prompts]
        assert most <= 2
        assert one.count("delegated_prefills", result="declined") >= 1


def test_remote_prefill_runs_under_the_terms_that_its_request_came_with(prefiller: Station) -> None:
    """Not under those that this engine's tenants add: the other one adds its own."""
    tenants = {"gold": {"weight": 5.0, "priority": -10}}
    with decoder(port_of(prefiller), engine={"tenants": tenants}) as one:
        one.engine.add(attrs.evolve(request_of("plain"), tenant="gold/ann", priority=3))
        one.engine.add(attrs.evolve(request_of("own"), tenant="gold/ann", priority=3, weight=0.5))
        one.step()
        eventually(lambda: prefiller.node.remote_prefills.num_remote_prefills == 2)
        terms = [(r.tenant, r.priority, r.weight) for r in prefiller.node.remote_prefills.take_new()]
        assert sorted(terms, key=str) == [("gold/ann", 3, 0.5), ("gold/ann", 3, None)]
        for name in ("plain", "own"):
            one.engine.abort(name)


def request_of(name: str) -> Request:
    return Request(request_id=name, prompt_token_ids=prompt_of(70, 21), params=SamplingParams(max_tokens=1))


def test_load_decides_then_the_prefix(prefiller: Station) -> None:
    with Station() as other, decoder(port_of(prefiller), port_of(other), heartbeat_s=60.0) as one:
        engines = one.node.prefill_pool.engines
        chosen = []
        for num_tokens in ((0, 500), (500, 0)):
            for engine, num in zip(engines, num_tokens, strict=True):
                engine.update(State(accepts=True, num_remote_prefills=1, num_tokens=num, tokens_per_s=0.0), 0.001)
            name = one.add(prompt_of(50 + num_tokens[0], 21), max_tokens=1)
            one.step()
            delegated = one.pair.scheduler._delegation._delegated[name]  # type: ignore[attr-defined]
            chosen.append(delegated.prefill.engine)
            one.engine.abort(name)
        assert chosen == list(engines)
        hashes = [bytes([i]) * 32 for i in range(200)]
        assert 50 < sum(engines[0].affinity(one) > engines[1].affinity(one) for one in hashes) < 150
