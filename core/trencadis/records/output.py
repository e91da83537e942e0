"""What comes back from a step, and what a client is given.

The records of the engine are attrs classes, as all others. Those that clients are given are made anew for every token of every stream: as
``msgspec`` structs they cost a tenth. ``TokenLogprobs`` are the most, by hundreds of thousands for one answer. The garbage collector
does not look at any of these, as they cannot be part of a cycle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import msgspec
import numpy as np

from trencadis.errors import RequestError
from trencadis.records.arrays import Int32Array
from trencadis.records.embedding import Embedding
from trencadis.records.request import FinishReason

__all__ = [
    "CompletionOutput",
    "ConnectorReport",
    "FailedLoad",
    "FinishedSequence",
    "RequestOutput",
    "RowError",
    "StepOutput",
    "TokenDeltas",
    "TokenLogprobs",
]


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True, gc=False, array_like=True):
    """Log-probabilities at one position of one sequence, natural logarithm.

    They are the model's own, before any sampling parameter, unless ``[sampling.standard] logprobs`` says otherwise.

    Attributes:
        index: Index of the sequence in the plan (inside the engine), or of the completion.
        position: Position of the token in the sequence, prompt included.
        token_id: The token that is there.
        logprob: Log-probability of the token.
        rank: 1 + number of tokens strictly more likely.
        top_token_ids: The most likely tokens, best first; as many as asked for.
        top_logprobs: Their log-probabilities.
    """

    index: int
    position: int
    token_id: int
    logprob: float
    rank: int
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@attrs.frozen(kw_only=True)
class FailedLoad:
    """A KV load that did not arrive whole.

    Attributes:
        transfer_id: Which load.
        num_valid_tokens: Leading tokens of the load, those after the local hit, whose KV is verified.
        cause: For the log.
    """

    transfer_id: int
    num_valid_tokens: int
    cause: str


@attrs.frozen(kw_only=True)
class ConnectorReport:
    """What a KV connector's worker side has finished since the last report, or what all of them together have.

    Attributes:
        loaded: Transfer ids whose blocks, or this rank's share of them, are verified and complete.
        failed: Loads that did not arrive whole.
        released: Transfer ids of which no transfer touches a block any more.
        messages: Messages of the worker side for its scheduler side, in order; see ``SupportsRemoteWorkers``.
    """

    loaded: tuple[int, ...] = ()
    failed: tuple[FailedLoad, ...] = ()
    released: tuple[int, ...] = ()
    messages: tuple[bytes, ...] = ()


@attrs.frozen(kw_only=True)
class RowError:
    """Why one sequence of a step, or one logits row of a call, got no token; the others did.

    Attributes:
        index: Which: of the plan in ``StepOutput``, of the logits rows in ``Sampled``.
        message: Reason, for the client and the log: names the component or the parameters of the request.
        is_invalid: Whether the request itself is the cause, and nothing is wrong with the engine: it ends as ``FinishReason.INVALID``.
    """

    index: int
    message: str
    is_invalid: bool = False


@attrs.frozen(kw_only=True, slots=False)
class StepOutput:
    """The result of one batch.

    Attributes:
        token_ids: Emitted tokens, sequence after sequence in plan order, int32 ``[sum(num_emitted)]``.
        num_emitted: Tokens per sequence of the plan, int32 ``[num_sequences]``: 0 for a chunk that is not the
            last and for one of ``row_errors``, 1, or up to ``1 + num_drafts``.
        logprobs: For output tokens of sequences that asked, in plan order.
        prompt_logprobs: For prompt tokens computed in this step, of sequences that asked.
        num_padded_tokens: Token positions computed, padding included.
        device_s: Seconds from the start to the end of the step on the device.
        num_compilations: Programs that had to be compiled for the step; 0 after a complete warm-up.
        connector_reports: Finished work of the KV connector's worker sides, by rank; of those only that have one.
        missed_layers: A layer was computed before a layer-wise KV load had brought it: sequences with such loads are discarded.
        row_errors: Sequences that got no token because of an error of their own: each ends with it, and the others go on.
        step: Number of the batch that it is the output of; -1: not said, and so not checked.
    """

    token_ids: Int32Array
    num_emitted: Int32Array
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_padded_tokens: int = 0
    device_s: float = 0.0
    num_compilations: int = 0
    connector_reports: Mapping[int, ConnectorReport] = attrs.Factory(dict)
    missed_layers: bool = False
    row_errors: tuple[RowError, ...] = ()
    step: int = -1


@attrs.frozen(kw_only=True)
class FinishedSequence:
    """A sequence that left the engine.

    Attributes:
        request_id: Id of the request.
        slot: The slot it had.
        token_ids: Output tokens, int32.
        finish_reason: Why it ended.
        num_prompt_tokens: Tokens of the prompt.
        num_cached_tokens: Prompt tokens taken from the prefix cache when it first ran.
        num_preemptions: How often it lost its blocks.
        arrival_s: When it was added, engine clock.
        first_scheduled_s: When it was first scheduled, or given a first token that another engine chose; or None.
        first_token_s: When its first token was committed, or None.
        finish_s: When it ended.
        error: Reason, for ``FinishReason.ERROR`` and ``INVALID``.
        stop_token_id: The token that ended it, for ``FinishReason.STOP`` by token, or None.
        transfer_params: Where another engine finds its KV, as the KV connector says; None for nowhere.
        num_approximate_tokens: Prompt tokens whose KV was approximate when it first ran; 0 unless the request asked for it.
        refusal: Why it was refused before it ran, with ``FinishReason.ERROR``; a client gets this error instead of an output.
    """

    request_id: str
    slot: int
    token_ids: Int32Array = attrs.field(eq=attrs.cmp_using(eq=np.array_equal))
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    arrival_s: float = 0.0
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finish_s: float = 0.0
    error: str = ""
    stop_token_id: int | None = None
    transfer_params: Mapping[str, Any] | None = None
    num_approximate_tokens: int = 0
    refusal: RequestError | None = None


@attrs.frozen(kw_only=True, slots=False)
class TokenDeltas:
    """New tokens of one commit, as arrays, and the sequences that ended in it.

    Attributes:
        slots: Slot of each sequence with new tokens, int32 ``[num]``.
        num_tokens: New tokens of each, int32 ``[num]``, at least 1.
        token_ids: All new tokens, sequence after sequence, int32 ``[sum(num_tokens)]``.
        finished: Sequences that ended; their slots may be given to others from now on.
        logprobs: By index into ``slots``.
        prompt_logprobs: ``index`` is the slot here: a chunk may yield prompt logprobs and no token.
        embeddings: Texts that were embedded since the last step.
    """

    slots: Int32Array
    num_tokens: Int32Array
    token_ids: Int32Array
    finished: tuple[FinishedSequence, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    embeddings: tuple[Embedding, ...] = ()


class CompletionOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One continuation of a prompt.

    Attributes:
        index: 0 .. n - 1.
        text: The text so far; without the stop string unless asked for.
        token_ids: Output tokens so far; a tuple once it has ended, until then what behaves as one.
        finish_reason: None while it runs.
        stop_reason: The stop string or stop token that ended it, or None.
        logprobs: One entry per output token if asked for, else None.
        score: Score that it was chosen by, the larger the better: with ``best_of`` the mean log-probability of its tokens, with beam search
            their sum by length to the power of ``length_penalty``; else None.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    score: float | None = None


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a client is given for one prompt.

    Attributes:
        request_id: Id of the request.
        prompt: The prompt's text, or None if it was given as token ids.
        prompt_token_ids: The prompt.
        outputs: n completions, by index; best first if they were chosen among more.
        finished: True once every completion has a finish reason.
        prompt_logprobs: One entry per prompt token but the first, if asked for, else None.
        num_cached_tokens: Prompt tokens that came from the prefix cache.
        error: Reason, if a completion ended with an error or was ignored.
        num_discarded_tokens: Tokens of completions that ``best_of`` dropped; they were generated all the same.
        transfer_params: Where another engine finds the prompt's KV, once it has ended; None for nowhere.
        num_approximate_tokens: Number of cached tokens whose KV is approximate, once it has ended: more than 0 only if the
            request asked for it. The text may then differ from what the model alone would give.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    num_cached_tokens: int = 0
    error: str = ""
    num_discarded_tokens: int = 0
    transfer_params: Mapping[str, Any] | None = None
    num_approximate_tokens: int = 0
