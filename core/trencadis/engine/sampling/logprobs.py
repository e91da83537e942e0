"""What log-probabilities have to be, whoever says them: a sampler, or the output of a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trencadis.interfaces import SampledLogprobs
from trencadis.records import TokenLogprobs

__all__ = ["are_whole", "wrong_logprobs"]

_ROUNDING = 1e-3
"""Log-probabilities of a certain token may come out above 0 by so much, in half precision."""


def wrong_logprobs(entry: TokenLogprobs | SampledLogprobs, *, end: int, vocab_size: int) -> str:
    """Return what is wrong with log-probabilities, in words that go on "an entry"; an empty string for nothing. Pure.

    Args:
        entry: Log-probabilities from a sampler or a step.
        end: Bound of the index.
        vocab_size: Tokens that the model knows.
    """
    if not are_whole((entry.index,), end):
        return f"whose index is none of 0 to {end - 1}"
    if not are_whole((entry.rank,), 1 << 31):
        return "whose rank is no whole number from 0 on"
    if not are_whole((entry.token_id, *entry.top_token_ids), vocab_size):
        return f"with a token outside 0 to {vocab_size - 1}"
    if len(entry.top_token_ids) != len(entry.top_logprobs):
        return "with another number of tokens than of log-probabilities"
    if not _are_logprobs((entry.logprob, *entry.top_logprobs)):
        return "with something else than log-probabilities, numbers from minus infinity to 0"
    return ""


def are_whole(numbers: Iterable[Any], end: int) -> bool:
    """Return whether all are Python's whole numbers below ``end``, which alone can be encoded. Pure."""
    return all(type(number) is int and 0 <= number < end for number in numbers)


def _are_logprobs(numbers: Iterable[Any]) -> bool:
    return all(isinstance(number, float) and number <= _ROUNDING for number in numbers)
