"""A first token as it travels from the engine that chose it."""

from __future__ import annotations

from trencadis.records import FirstToken, TokenLogprobs
from trencadis_kv.wire.stream_messages import Token

__all__ = ["decode_token", "encode_token"]


def encode_token(first: FirstToken) -> Token:
    """Return what is sent of a token. Pure."""
    logprobs = first.logprobs
    if logprobs is None:
        return Token(token_id=first.token_id)
    return Token(
        token_id=first.token_id,
        logprob=logprobs.logprob,
        rank=logprobs.rank,
        top_token_ids=list(logprobs.top_token_ids),
        top_logprobs=list(logprobs.top_logprobs),
    )


def decode_token(token: Token) -> FirstToken:
    """Return the token that was sent; the engine looks at whether it can be. Pure."""
    if token.rank < 1:
        return FirstToken(token_id=token.token_id)
    logprobs = TokenLogprobs(
        index=0,
        position=0,
        token_id=token.token_id,
        logprob=token.logprob,
        rank=token.rank,
        top_token_ids=tuple(token.top_token_ids),
        top_logprobs=tuple(token.top_logprobs),
    )
    return FirstToken(token_id=token.token_id, logprobs=logprobs)
