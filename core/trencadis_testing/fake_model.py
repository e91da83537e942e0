"""A "model" in plain arithmetic: the next token depends on every token before it and its position. All pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trencadis.records import TokenLogprobs

__all__ = ["MULTIPLIER", "START", "chain", "fake_embedding", "fake_logprob", "fake_next_token", "fake_text"]

_MASK = (1 << 64) - 1
MULTIPLIER = 6364136223846793005
"""By which an entry is multiplied to get the next."""
START = 0x9E3779B97F4A7C15
"""What stands before the first entry."""


def chain(state: int, token: int, position: int) -> int:
    """Return the KV entry that follows another: a number made of it, the token and its position."""
    return ((state ^ (token + 1)) * MULTIPLIER + position) & _MASK


def fake_next_token(state: int, vocab_size: int) -> int:
    """Return the token that follows a chain state. Pure."""
    return (state >> 33) % vocab_size


def fake_text(prompt: tuple[int, ...] | list[int], num_tokens: int, *, vocab_size: int = 97, eos: int = 0) -> list[int]:
    """Return what a :class:`FakeBackend` must generate: the slow reference, without cache, blocks or batches. Pure.

    Args:
        prompt: Prompt token ids.
        num_tokens: The most tokens to generate; ends after ``eos``.
        vocab_size: Size of the backend's vocabulary.
        eos: End-of-sequence token; -1 for none.
    """
    state = START
    for position, token in enumerate(prompt):
        state = chain(state, token, position)
    output: list[int] = []
    while len(output) < num_tokens:
        token = fake_next_token(state, vocab_size)
        output.append(token)
        if token == eos:
            break
        state = chain(state, token, len(prompt) + len(output) - 1)
    return output


def fake_embedding(tokens: Sequence[int], size: int = 8) -> list[float]:
    """Return what a :class:`FakeBackend` must embed a text as: a vector of length 1 that depends on every token. Pure.

    Args:
        tokens: Token ids of the text.
        size: Size of the vector.
    """
    state = START
    for position, token in enumerate(tokens):
        state = chain(state, token, position)
    vector = []
    for index in range(size):
        state = chain(state, index, len(tokens))
        vector.append((state >> 40) / (1 << 23) - 1)
    length = math.sqrt(sum(value * value for value in vector))
    return [value / length for value in vector]


def fake_logprob(index: int, position: int, token: int, asked: int) -> TokenLogprobs:
    """Return the log-probability of a token, which is always the same, with so many alternatives. Pure."""
    top = tuple(range(asked))
    return TokenLogprobs(
        index=index,
        position=position,
        token_id=token,
        logprob=-1.0,
        rank=1,
        top_token_ids=top,
        top_logprobs=(-1.0,) * asked,
    )
