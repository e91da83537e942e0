from __future__ import annotations

import math

import msgspec
import pytest

from trencadis.records import FirstToken, TokenLogprobs
from trencadis_kv.wire.stream_messages import (
    BODIES,
    KINDS,
    Kind,
    PrefillRequest,
    PrefillResponse,
    State,
    Token,
    decode_token,
    encode_token,
)


def test_every_kind_but_a_block_has_a_body_of_its_own_and_the_number_it_always_had() -> None:
    assert set(BODIES) == set(Kind) - {Kind.BLOCK}
    assert {KINDS[body]: body for body in KINDS} == BODIES
    names = (
        "HELLO WELCOME REFUSE PROOF PULL BLOCK COMMIT ABORT RENEW RELEASE ACK STATUS STATE PREFILL_REQUEST PREFILL_RESPONSE PLACED TAKEN "
        "LAYERS"
    )
    assert [kind.name for kind in sorted(Kind)] == names.split()
    assert sorted(Kind) == list(range(1, 19))


@pytest.mark.parametrize(
    "message",
    [
        PrefillRequest(tokens=b"\1\0\0\0", tenant="t", cache_salt="s", adapter="", timeout_s=2.5),
        PrefillResponse(hold_id="x", num_tokens=16, lease_s=30.0),
        State(accepts=True, num_remote_prefills=2, num_tokens=300, tokens_per_s=1e4),
        PrefillRequest(
            tokens=b"\1\0\0\0", tenant="t", cache_salt="s", adapter="", timeout_s=2.5, priority=-3, weight=0.5
        ),
    ],
)
def test_later_minor_versions_may_append_fields(message: msgspec.Struct) -> None:
    fields = msgspec.to_builtins(message)
    assert isinstance(fields, list), "names would cost bytes"
    longer = msgspec.msgpack.encode([*msgspec.msgpack.decode(msgspec.msgpack.encode(message)), "later"])
    assert msgspec.msgpack.decode(longer, type=type(message)) == message


def test_invitation_of_an_engine_that_knows_no_priorities_has_none_and_is_read_by_it() -> None:
    fields = msgspec.msgpack.encode([b"\1\0\0\0", "t", "s", "a", 2.5])
    request = msgspec.msgpack.decode(fields, type=PrefillRequest)
    assert (request.adapter, request.timeout_s, request.priority, request.weight) == ("a", 2.5, 0, None)

    class OldInvite(msgspec.Struct, array_like=True):
        tokens: bytes
        tenant: str
        cache_salt: str
        adapter: str
        timeout_s: float

    new = msgspec.msgpack.encode(msgspec.structs.replace(request, priority=5, weight=2.0))
    assert msgspec.msgpack.decode(new, type=OldInvite).timeout_s == 2.5


def test_engines_of_before_offers_brought_anything_along_are_understood_and_understand():
    """They send no more fields, and skip those that they do not know: this is what their messages looked like."""

    class OldInvite(msgspec.Struct, array_like=True):
        tokens: bytes
        tenant: str
        cache_salt: str
        adapter: str
        timeout_s: float
        priority: int = 0
        weight: float | None = None

    class OldOffer(msgspec.Struct, array_like=True):
        hold_id: str
        num_tokens: int
        lease_s: float

    old_request, old_response = OldInvite(b"\1\0\0\0", "t", "s", "a", 5.0, 2, 1.5), OldOffer("hold_id", 16, 30.0)
    request = msgspec.msgpack.decode(msgspec.msgpack.encode(old_request), type=PrefillRequest)
    assert (request.weight, request.sampling, request.push_bytes, request.num_skipped) == (1.5, b"", 0, 0)
    response = msgspec.msgpack.decode(msgspec.msgpack.encode(old_response), type=PrefillResponse)
    assert (response.hold_id, response.token, response.num_pushed) == ("hold_id", None, 0)
    new_request = msgspec.structs.replace(request, sampling=b"sampling", push_bytes=4096, num_skipped=1)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(new_request), type=OldInvite) == old_request
    new_response = msgspec.structs.replace(response, token=Token(token_id=3), num_pushed=2)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(new_response), type=OldOffer) == old_response


def entry(**changes):
    given = {"logprob": -1.25, "rank": 3, "top_token_ids": (7, 8), "top_logprobs": (-0.1, -math.inf)}
    return TokenLogprobs(index=0, position=0, token_id=9, **{**given, **changes})


@pytest.mark.parametrize(
    "first",
    [
        FirstToken(token_id=0),
        FirstToken(token_id=9, logprobs=entry()),
        FirstToken(token_id=9, logprobs=entry(top_token_ids=(), top_logprobs=())),
    ],
)
def test_token_is_the_same_at_the_other_end(first):
    travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(encode_token(first)), type=Token)
    assert decode_token(travelled) == first
