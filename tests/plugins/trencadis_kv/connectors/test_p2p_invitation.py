from __future__ import annotations

import threading

from eventually import eventually
from p2p_ends import Producer, producing

from trencadis.records import Request, TransferCause
from trencadis_kv.connectors.p2p.invitation import Invitation
from trencadis_kv.connectors.p2p.params import RemotePrefix, offer
from trencadis_kv.connectors.p2p.registry import PrefillEngine

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
    """An invitation on its thread."""

    def __init__(self, producer: Producer, *, timeout_s: float = 5.0, port: int = 0) -> None:
        engine = PrefillEngine(f"127.0.0.1:{port or producer.node.server.port}")
        self.given_back: list[RemotePrefix] = []
        producer.node.errands.release = self.given_back.append  # type: ignore[method-assign]
        self.invitation = Invitation(
            engine,
            REQUEST,
            producer.node,
            timeout_s=timeout_s,
        )
        self.thread = threading.Thread(target=self.invitation.run)
        self.thread.start()

    def result(self) -> RemotePrefix | TransferCause | None:
        self.thread.join(60)
        assert self.invitation.is_done
        error = self.invitation.error
        return self.invitation.prefix if error is None else error.cause


def end(producer: Producer, error: str = "") -> None:
    """Let the one guest end, as an engine would."""
    (request,) = producer.node.guests.take_new()
    producer.node.guests.ended(request.request_id, None if error else offer(producer.prefix, blocks=[]), error)


def test_offer_says_where_the_blocks_are_of_the_engine_that_was_asked() -> None:
    with producing() as producer:
        sent = Sent(producer)
        eventually(lambda: producer.node.guests.num_guests == 1)
        assert not sent.invitation.is_done
        (guest,) = producer.node.guests._guests.values()
        for name in ("prompt_token_ids", "tenant", "cache_salt", "adapter", "priority", "weight"):
            assert getattr(guest.request, name) == getattr(REQUEST, name)
        end(producer)
        assert sent.result() == producer.prefix
        assert sent.given_back == []


def test_refusals_and_failures_come_with_their_cause() -> None:
    with producing() as producer:
        sent = Sent(producer)
        eventually(lambda: producer.node.guests.num_guests == 1)
        end(producer, "the prompt is too long")
        assert sent.result() == TransferCause.FULL
        assert "the prompt is too long" in str(sent.invitation.error)
        producer.node.guests.accepts = False
        assert Sent(producer).result() == TransferCause.FULL
        producer.node.guests.accepts = True
        assert Sent(producer, timeout_s=0.05).result() == TransferCause.DEADLINE
        eventually(lambda: producer.node.guests.num_guests == 0)
        port = producer.node.server.port
    assert Sent(producer, port=port).result() == TransferCause.UNREACHABLE


def test_engine_that_ends_meanwhile_is_noticed_at_once() -> None:
    with producing() as producer:
        sent = Sent(producer)
        eventually(lambda: producer.node.guests.num_guests == 1)
        producer.node.close()
        assert isinstance(sent.result(), TransferCause)


def test_withdrawal_before_during_and_after_leaves_nothing_behind() -> None:
    with producing() as producer:
        before = Sent.__new__(Sent)
        before.given_back = []
        before.invitation = Invitation(
            PrefillEngine(f"127.0.0.1:{producer.node.server.port}"),
            REQUEST,
            producer.node,
            timeout_s=5.0,
        )
        before.invitation.withdraw()
        before.invitation.run()
        assert before.invitation.is_done
        assert producer.node.guests.num_guests == 0

        during = Sent(producer)
        eventually(lambda: producer.node.guests.num_guests == 1)
        during.invitation.withdraw()
        assert isinstance(during.result(), TransferCause)
        eventually(lambda: producer.node.guests.num_guests == 0)

        after = Sent(producer)
        eventually(lambda: producer.node.guests.num_guests == 1)
        end(producer)
        assert after.result() == producer.prefix
        after.invitation.withdraw()
        assert after.given_back == [producer.prefix]
