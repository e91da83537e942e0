"""What a client asked for as a whole: one prompt and its n completions."""

from __future__ import annotations

import attrs

from trencadis.errors import RequestError
from trencadis.front.completion import Completion
from trencadis.front.expand import expand
from trencadis.front.output_stream import OutputStream
from trencadis.records import FinishReason, Request, RequestOutput, TokenLogprobs
from trencadis.text import Tokenizer

__all__ = ["ClientRequest"]


class ClientRequest:
    """Merges the completions of one prompt, by index.

    Args:
        request: As the client gave it, ``params.n`` included.
        prompt: Its text, or None if it was given as token ids.
        tokenizer: Of the model.
        streams: The client wants to see every change, not only the end.

    Attributes:
        request_id: The client's.
        streams: As given.
        requests: What the engine runs, by completion index.
        completions: One for each.
        num_changes: How often there was news; the processor counts it.
        refusal: Why the engine did not take it after all, or None.
        stream: Gets its outputs; None if they are asked for.
    """

    __slots__ = (
        "_prompt",
        "_prompt_logprobs",
        "_prompt_token_ids",
        "completions",
        "num_changes",
        "refusal",
        "request_id",
        "requests",
        "stream",
        "streams",
    )

    def __init__(self, request: Request, *, prompt: str | None, tokenizer: Tokenizer, streams: bool) -> None:
        self.request_id = request.request_id
        self.streams = streams
        self.num_changes = 0
        self.refusal: RequestError | None = None
        self.stream: OutputStream | None = None
        self.requests = expand(request)
        self.completions = tuple(
            Completion(one, index=index, tokenizer=tokenizer, streams=streams)
            for index, one in enumerate(self.requests)
        )
        self._prompt = prompt
        self._prompt_token_ids = request.prompt_token_ids
        self._prompt_logprobs: dict[int, TokenLogprobs] | None = None if request.params.prompt_logprobs is None else {}

    @property
    def is_finished(self) -> bool:
        """True once every completion has ended."""
        for completion in self.completions:  # noqa: SIM110 - asked several times a token: all() costs four times as much
            if completion.finish_reason is None:
                return False
        return True

    def add_prompt_logprobs(self, entry: TokenLogprobs) -> None:
        """Take the log-probabilities of one prompt token; a prompt that is computed twice gives them twice."""
        if self._prompt_logprobs is not None:
            self._prompt_logprobs[entry.position] = attrs.evolve(entry, index=0)

    def output(self) -> RequestOutput:
        """Return what there is so far. Pure; O(length)."""
        outputs = tuple(map(Completion.output, self.completions))
        finished = self.is_finished
        prompt_logprobs = None
        if self._prompt_logprobs is not None:
            prompt_logprobs = tuple(self._prompt_logprobs[position] for position in sorted(self._prompt_logprobs))
        failed = [one.error for one in self.completions if one.finish_reason is FinishReason.ERROR] if finished else ()
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=outputs,
            finished=finished,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=self.completions[0].num_cached_tokens,
            error=failed[0] if failed else "",
        )
