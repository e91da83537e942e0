from __future__ import annotations

import math

import msgspec
import pytest

from trencadis.records import FirstToken, TokenLogprobs
from trencadis_kv.wire.stream_messages import (
    BODIES,
    KINDS,
    Kind,
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
