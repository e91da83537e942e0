"""Which completions of a prompt are returned, if more were generated."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from trencadis.records import CompletionOutput, FinishReason, TokenLogprobs

__all__ = ["best_of", "mean_logprob"]

_FAILED = (FinishReason.ERROR, FinishReason.INVALID, FinishReason.ABORT, FinishReason.IGNORED)


def best_of(completions: Sequence[CompletionOutput], n: int, *, has_logprobs: bool) -> tuple[CompletionOutput, ...]:
    """Return the n completions with the largest mean log-probability, best first, with that as their score. Pure.

    Among equals the one generated first comes first; what failed or was aborted comes last.

    Args:
        completions: Finished, with log-probabilities.
        n: How many to return.
        has_logprobs: The client asked for log-probabilities; else they are left out.

    Source: OpenAI's API reference, ``best_of``: those "with the highest log probability per token".
    """
    scores = [-math.inf if one.finish_reason in _FAILED else mean_logprob(one.logprobs or ()) for one in completions]
    order = sorted(range(len(completions)), key=lambda index: -scores[index])
    return tuple(
        msgspec.structs.replace(
            completions[chosen],
            index=index,
            logprobs=_reindexed(completions[chosen].logprobs or (), index) if has_logprobs else None,
            score=scores[chosen],
        )
        for index, chosen in enumerate(order[:n])
    )


def mean_logprob(entries: Sequence[TokenLogprobs]) -> float:
    """Return the mean log-probability of tokens; minus infinity if there are none. Pure."""
    return math.fsum(entry.logprob for entry in entries) / len(entries) if entries else -math.inf


def _reindexed(entries: Sequence[TokenLogprobs], index: int) -> tuple[TokenLogprobs, ...]:
    return tuple(msgspec.structs.replace(entry, index=index) for entry in entries)
