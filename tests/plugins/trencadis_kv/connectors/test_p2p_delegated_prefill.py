from __future__ import annotations

import threading

from support.eventually import eventually
from support.kv.p2p_ends import Producer, producing
from trencadis.records import Request, TransferCause
from trencadis_kv.connectors.p2p.delegation import DelegatedPrefill
from trencadis_kv.connectors.p2p.params import RemotePrefix, offer
from trencadis_kv.connectors.p2p.prefill_pool import PrefillEngine

REQUEST = Request(
    request_id="r",
    prompt_token_ids=range(1, 20),
    tenant="key/user",
    cache_salt="s",
    adapter="a",
    priority=-2,
    weight=3.0,
)


class Sent:
    """An prefill on its thread."""

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
    producer.node.remote_prefills.ended(request.request_id, None if error else offer(producer.prefix, blocks=[]), error)


def test_offer_says_where_the_blocks_are_of_the_engine_that_was_asked() -> None:
    with producing() as producer:
        sent = Sent(producer)
        eventually(lambda: producer.node.remote_prefills.num_remote_prefills == 1)
        assert not sent.prefill.is_done
        (prefill,) = producer.node.remote_prefills._remote_prefills.values()
        for name in ("prompt_token_ids", "tenant", "cache_salt", "adapter", "priority", "weight"):
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


def test_engine_that_ends_meanwhile_is_noticed_at_once() -> None:
    with producing() as producer:
        sent = Sent(producer)
        eventually(lambda: producer.node.remote_prefills.num_remote_prefills == 1)
        producer.node.close()
        assert isinstance(sent.result(), TransferCause)


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
