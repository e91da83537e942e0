"""What a step of an engine brought, as a client takes it: plain numbers, which cost less one by one than those of arrays."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from trencadis.errors import RequestError
from trencadis.records import Embedding, FinishedSequence, TokenDeltas, TokenLogprobs

__all__ = ["NO_NEWS", "StepNews", "news_of"]


class StepNews(msgspec.Struct, frozen=True, kw_only=True):
    """``TokenDeltas`` without arrays, and what was refused.

    Attributes:
        slots: Slot of each sequence with new tokens.
        num_tokens: New tokens of each, at least 1.
        token_ids: All new tokens, sequence after sequence.
        finished: Sequences that ended; their slots may be given to others from now on.
        logprobs: By index into ``slots``.
        prompt_logprobs: ``index`` is the slot here: a chunk may yield prompt logprobs and no token.
        embeddings: Texts that were embedded since the last step.
        refused: Ids of requests and texts that the engine did not take after all, and why.
    """

    slots: Sequence[int] = ()
    num_tokens: Sequence[int] = ()
    token_ids: Sequence[int] = ()
    finished: tuple[FinishedSequence, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    embeddings: tuple[Embedding, ...] = ()
    refused: tuple[tuple[str, RequestError], ...] = ()


NO_NEWS = StepNews()


def news_of(deltas: TokenDeltas) -> StepNews:
    """Return what an engine in this process says. Pure."""
    return StepNews(
        slots=deltas.slots.tolist(),
        num_tokens=deltas.num_tokens.tolist(),
        token_ids=deltas.token_ids.tolist(),
        finished=tuple([one for one in deltas.finished if one.refusal is None]),
        refused=tuple([(one.request_id, one.refusal) for one in deltas.finished if one.refusal is not None]),
        logprobs=deltas.logprobs,
        prompt_logprobs=deltas.prompt_logprobs,
        embeddings=deltas.embeddings,
    )
