"""What a client asked for as a whole: one prompt and its completions."""

from __future__ import annotations

import msgspec

from trencadis.client.best_of import best_of
from trencadis.client.completion import Completion
from trencadis.client.expand import expand
from trencadis.client.output_stream import OutputStream
from trencadis.client.prompts import Prompt
from trencadis.errors import RequestError
from trencadis.records import CompletionOutput, FinishedSequence, FinishReason, Request, RequestOutput, TokenLogprobs
from trencadis.text import Tokenizer

__all__ = ["ClientRequest", "ignored_output"]

_FAILED = (FinishReason.ERROR, FinishReason.INVALID, FinishReason.IGNORED)


class ClientRequest:
    """Merges the completions of one prompt, by index.

    Args:
        request: As the client gave it, ``params.n`` and ``params.best_of`` included.
        prompt: Its text, or None if it was given as token ids.
        tokenizer: Of the model.
        streams: The client wants to see every change, not only the end.

    Attributes:
        request_id: The client's.
        streams: As given; False where ``best_of`` is to choose, which it can at the end only.
        requests: What the engine runs, by completion index.
        completions: One for each.
        is_finished: True once every completion has ended.
        num_changes: How often there was news; the processor counts it.
        is_changed: For the processor: there is news that it has not counted.
        refusal: Why the engine did not take it after all, or None.
        stream: Gets its outputs; None if they are asked for.
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
            Completion(one, index=index, tokenizer=tokenizer, streams=self.streams)
            for index, one in enumerate(self.requests)
        )
        self._params = request.params
        self._is_chosen = request.params.is_chosen
        self._prompt = prompt
        self._prompt_token_ids = request.prompt_token_ids
        self._prompt_logprobs: dict[int, TokenLogprobs] | None = None if request.params.prompt_logprobs is None else {}
        self._sorted_prompt_logprobs: tuple[TokenLogprobs, ...] | None = None

    def finish(self, completion: Completion, finished: FinishedSequence) -> None:
        """Take the end of a completion's sequence."""
        completion.finish(finished)
        self._look_for_end()

    def fail(self, completion: Completion, error: str) -> None:
        """End a completion that has not run."""
        completion.fail(error)
        self._look_for_end()

    def _look_for_end(self) -> None:
        # Asked for several times a token: looked up once.
        self.is_finished = all(one.finish_reason is not None for one in self.completions)

    def add_prompt_logprobs(self, entry: TokenLogprobs) -> None:
        """Take the log-probabilities of one prompt token; a prompt that is computed twice gives them twice."""
        if self._prompt_logprobs is not None:
            self._prompt_logprobs[entry.position] = (
                entry if entry.index == 0 else msgspec.structs.replace(entry, index=0)
            )
            self._sorted_prompt_logprobs = None

    def output(self) -> RequestOutput:
        """Return what there is so far, or, where ``best_of`` is to choose, no completion before the end. Pure; O(length)."""
        completions, finished = self.completions, self.is_finished
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
            num_cached_tokens=completions[0].num_cached_tokens,
            error=failed[0] if failed else "",
            num_discarded_tokens=num_discarded,
            transfer_params=completions[0].transfer_params,
            num_approximate_tokens=max(one.num_approximate_tokens for one in completions),
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
