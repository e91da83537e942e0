"""Client request: one prompt and its completions, ``n`` or the best of more."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import msgspec

from trencadis.client.completion import Completion
from trencadis.client.output_stream import OutputStream
from trencadis.client.prompts import Prompt
from trencadis.errors import RequestError
from trencadis.records import (
    CompletionOutput,
    FinishedSequence,
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
    evolve_unchecked,
)
from trencadis.text import Tokenizer

__all__ = ["ClientRequest", "best_of", "expand", "ignored_output", "mean_logprob"]

_FAILED = (FinishReason.ERROR, FinishReason.INVALID, FinishReason.IGNORED)


class ClientRequest:
    """One prompt: the engine requests of its completions, and their merged output.

    Args:
        request: The client's, with ``params.n`` and ``params.best_of``.
        prompt: Text of the prompt, or None if it was given as token ids.
        tokenizer: Tokenizer of the model.
        streams: Every change is reported, not only the end.

    Attributes:
        request_id: The client's.
        streams: Whether tokens are streamed; False with ``best_of``, which chooses at the end.
        requests: Engine requests, by completion index.
        completions: One for each.
        is_finished: True once every completion has ended.
        num_changes: How often the output changed; counted by the output processor.
        is_changed: Used by the output processor: changed in this step.
        refusal: Why the engine refused it after it was queued, or None.
        stream: Gets its outputs; None: the caller reads :meth:`output`.
    """

    __slots__ = (
        "_is_chosen",
        "_params",
        "_prompt",
        "_prompt_logprobs",
        "_prompt_token_ids",
        "_sorted_prompt_logprobs",
        "completions",
        "is_changed",
        "is_finished",
        "num_changes",
        "refusal",
        "request_id",
        "requests",
        "stream",
        "streams",
    )

    def __init__(self, request: Request, *, prompt: str | None, tokenizer: Tokenizer, streams: bool) -> None:
        self.request_id = request.request_id
        self.streams = streams and not request.params.is_chosen
        self.num_changes = 0
        self.is_changed = False
        self.is_finished = False
        self.refusal: RequestError | None = None
        self.stream: OutputStream | None = None
        self.requests = expand(request)
        self.completions = tuple(
            [
                Completion(one, index=index, tokenizer=tokenizer, streams=self.streams)
                for index, one in enumerate(self.requests)
            ]
        )
        self._params = request.params
        self._is_chosen = request.params.is_chosen
        self._prompt = prompt
        self._prompt_token_ids = request.prompt_token_ids
        self._prompt_logprobs: dict[int, TokenLogprobs] | None = None if request.params.prompt_logprobs is None else {}
        self._sorted_prompt_logprobs: tuple[TokenLogprobs, ...] | None = None

    def finish(self, completion: Completion, finished: FinishedSequence) -> None:
        """Finish one completion."""
        completion.finish(finished)
        self._update_finished()

    def fail(self, completion: Completion, error: str) -> None:
        """Finish a completion that has not run."""
        completion.fail(error)
        self._update_finished()

    def _update_finished(self) -> None:
        self.is_finished = None not in [one.finish_reason for one in self.completions]

    def add_prompt_logprobs(self, entry: TokenLogprobs) -> None:
        """Store the log-probabilities of one prompt token; a prompt that is computed twice gives them twice."""
        if self._prompt_logprobs is not None:
            self._prompt_logprobs[entry.position] = (
                entry if entry.index == 0 else msgspec.structs.replace(entry, index=0)
            )
            self._sorted_prompt_logprobs = None

    def output(self) -> RequestOutput:
        """Return the output so far; with ``best_of`` no completion before the end. Pure; O(length)."""
        completions, finished = self.completions, self.is_finished
        if not finished and len(completions) == 1 and self._prompt_logprobs is None:  # each token of most streams
            return RequestOutput(
                request_id=self.request_id,
                prompt=self._prompt,
                prompt_token_ids=self._prompt_token_ids,
                outputs=(completions[0].output(),),
                finished=False,
            )
        if self._prompt_logprobs is not None and self._sorted_prompt_logprobs is None:
            entries = self._prompt_logprobs
            self._sorted_prompt_logprobs = tuple([entries[position] for position in sorted(entries)])
        failed = [one.error for one in completions if one.finish_reason in _FAILED] if finished else ()
        outputs, num_discarded = tuple([one.output() for one in completions]), 0
        if self._is_chosen:
            num_generated = sum(len(one.token_ids) for one in outputs)
            outputs = self._chosen(outputs) if finished else ()
            num_discarded = num_generated - sum(len(one.token_ids) for one in outputs)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=outputs,
            finished=finished,
            prompt_logprobs=self._sorted_prompt_logprobs,
            num_cached_tokens=completions[0].ended.num_cached_tokens,
            error=failed[0] if failed else "",
            num_discarded_tokens=num_discarded,
            transfer_params=completions[0].ended.transfer_params,
            num_approximate_tokens=max([one.ended.num_approximate_tokens for one in completions]),
        )

    def _chosen(self, outputs: tuple[CompletionOutput, ...]) -> tuple[CompletionOutput, ...]:
        return best_of(outputs, self._params.n, has_logprobs=self._params.logprobs is not None)


def ignored_output(request_id: str, prompt: Prompt, error: RequestError) -> RequestOutput:
    """Return the output of a request that was refused before the engine had it. Pure."""
    return RequestOutput(
        request_id=request_id,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=(),
        outputs=(CompletionOutput(index=0, text="", token_ids=(), finish_reason=FinishReason.IGNORED),),
        finished=True,
        error=str(error),
    )


_NUM_SEEDS = 2**63


def expand(request: Request) -> tuple[Request, ...]:
    """Return the engine requests for the completions of ``request``, by index: ``best_of`` of them, or ``n``. Pure.

    They are named ``id/0``, ``id/1`` ... and share the prompt's KV through the prefix cache. With a seed, completion i draws with
    ``seed + i`` (modulo 2**63), so the first equals what ``n = 1`` gives; without one, each draws from its own name. Log-probabilities
    of the prompt are computed once, by the first, which alone has the transfer parameters: one prefix is handed over once. With
    ``best_of``, each token's log-probability is reported.
    """
    params = request.params
    if params.num_generated == 1:
        return (request,)
    first = attrs.evolve(
        params, n=1, best_of=None, logprobs=0 if params.logprobs is None and params.is_chosen else params.logprobs
    )
    other = first if first.prompt_logprobs is None else attrs.evolve(first, prompt_logprobs=None)
    rest = request if request.transfer_params is None else evolve_unchecked(request, transfer_params=None)
    return tuple(
        evolve_unchecked(
            rest if index else request,
            request_id=f"{request.request_id}/{index}",
            params=_seeded(other if index else first, index),
        )
        for index in range(params.num_generated)
    )


def _seeded(params: SamplingParams, index: int) -> SamplingParams:
    return params if params.seed is None else evolve_unchecked(params, seed=(params.seed + index) % _NUM_SEEDS)


_WITHOUT_SCORE = (*_FAILED, FinishReason.ABORT)


def best_of(completions: Sequence[CompletionOutput], n: int, *, has_logprobs: bool) -> tuple[CompletionOutput, ...]:
    """Return the n completions with the largest mean log-probability, best first, with that as their score. Pure.

    Among equals the one generated first comes first; failed and aborted ones come last.

    Args:
        completions: Finished, with log-probabilities.
        n: How many to return.
        has_logprobs: The client asked for log-probabilities; else they are left out.

    Source: OpenAI's API reference, ``best_of``: those "with the highest log probability per token".
    """
    scores = [
        -math.inf if one.finish_reason in _WITHOUT_SCORE else mean_logprob(one.logprobs or ()) for one in completions
    ]
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
