"""Answers of ``/v1/completions`` from outputs of the engine, whole or in chunks. Choice j of prompt i has the index i x n + j."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import attrs
import msgspec
from msgspec import UNSET

from trencadis.api import Tokenizer
from trencadis.records import CompletionOutput, RequestOutput, TokenLogprobs
from trencadis_server.generation.connection import DirectWrites
from trencadis_server.generation.generation import Generation, transfer_fields, usage_of
from trencadis_server.generation.logprobs import CompletionLogprobsWriter, joined, prompt_logprobs
from trencadis_server.generation.sse import ChunkEncoder, Progress, finish_name
from trencadis_server.protocol.answers import PromptLogprob
from trencadis_server.protocol.completions import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    TextCompletion,
)

__all__ = ["ChoiceWriter", "CompletionFormat", "CompletionWriter", "PromptLogprobsWriter"]


@attrs.frozen(kw_only=True, eq=False)
class CompletionFormat:
    """Parts that the client requested of an answer.

    Attributes:
        tokenizer: Tokenizer of the model.
        has_output: Whether the answer has output; False: only the prompt, without the one token that the engine makes.
        has_logprobs: Whether it has log-probabilities of the tokens.
        has_token_ids: Whether it has token ids.
        has_prompt_logprobs: Whether it has log-probabilities of the prompt, in vLLM's format.
        hides_special: Whether special tokens have no text.
    """

    tokenizer: Tokenizer
    has_output: bool = True
    has_logprobs: bool = False
    has_token_ids: bool = False
    has_prompt_logprobs: bool = False
    hides_special: bool = True

    @classmethod
    def of(cls, body: CompletionRequest, tokenizer: Tokenizer) -> CompletionFormat:
        """Return the format that a request asks for. Pure."""
        return cls(
            tokenizer=tokenizer,
            has_output=body.max_tokens != 0,
            has_logprobs=body.logprobs is not None,
            has_token_ids=bool(body.return_token_ids),
            has_prompt_logprobs=body.prompt_logprobs is not None,
            hides_special=body.skip_special_tokens is None or body.skip_special_tokens,
        )


class PromptLogprobsWriter:
    """Writes the log-probabilities of one prompt once for all its choices: a prompt may have a thousand short answers.

    Args:
        format: Parts that the client requested.
    """

    def __init__(self, format: CompletionFormat) -> None:  # noqa: A002
        self._format = format
        self._of: tuple[TokenLogprobs, ...] | None = None
        self._listed: list[dict[str, PromptLogprob] | None] = []
        self._echoed: tuple[CompletionLogprobs, int] | None = None

    def output_writer(self, output: RequestOutput, *, offset: int = 0) -> CompletionLogprobsWriter:
        """Return a writer for the tokens after the prompt, whose text begins at ``offset``."""
        return CompletionLogprobsWriter(
            self._format.tokenizer,
            hides_special=self._format.hides_special,
            prompt_token_ids=output.prompt_token_ids,
            offset=offset,
        )

    def listed(self, entries: tuple[TokenLogprobs, ...]) -> list[dict[str, PromptLogprob] | None]:
        """Return log-probabilities in vLLM's format; the same list for the same entries."""
        if self._of is not entries:
            self._of, self._listed = entries, prompt_logprobs(entries, self._format.tokenizer)
        return self._listed

    def echoed(self, output: RequestOutput) -> tuple[CompletionLogprobs, CompletionLogprobsWriter]:
        """Return log-probabilities of an echoed prompt, and a writer for later tokens; call once the prompt is complete."""
        if self._echoed is None:
            writer = CompletionLogprobsWriter(self._format.tokenizer, hides_special=self._format.hides_special)
            written = writer.prompt(output.prompt_token_ids, output.prompt_logprobs or ())
            self._echoed = written, writer.end()
        written, end = self._echoed
        return written, self.output_writer(output, offset=end)


class ChoiceWriter:
    """Writes the new part of a completion whose outputs are cumulative. A whole answer is a stream of one chunk.

    Args:
        format: Parts that the client requested.
        index: Index of the choice in the answer.
        echo: Text in front of the output, or None.
        prompt: Writer shared by the choices of one prompt; None: this is the only choice.
    """

    def __init__(
        self,
        format: CompletionFormat,  # noqa: A002
        *,
        index: int,
        echo: str | None,
        prompt: PromptLogprobsWriter | None = None,
    ) -> None:
        self._format = format
        self._index = index
        self._echo = echo
        self._prompt = prompt or PromptLogprobsWriter(format)
        self._progress = Progress(has_token_ids=format.has_logprobs or format.has_token_ids)
        self._logprobs: CompletionLogprobsWriter | None = None

    def take(self, output: RequestOutput, one: CompletionOutput) -> CompletionChoice | None:
        """Return the new part since the last call, or None.

        Args:
            output: Output of the prompt.
            one: The completion, one of ``output.outputs``.
        """
        progress, wanted = self._progress, self._format
        if progress.is_finished or (self._echo is not None and not self._is_ready(output)):
            return None
        text, token_ids, entries = progress.take(one) if wanted.has_output else ("", (), ())
        is_first, progress.is_open = not progress.is_open, True
        progress.is_finished = one.finish_reason is not None
        if is_first and self._echo is not None:
            text = self._echo + text
        if not (text or progress.is_finished or token_ids):
            return None
        return self._written(output, one, text, token_ids, entries, is_first=is_first)

    def _written(
        self,
        output: RequestOutput,
        one: CompletionOutput,
        text: str,
        token_ids: tuple[int, ...],
        entries: tuple[TokenLogprobs, ...],
        *,
        is_first: bool,
    ) -> CompletionChoice:
        wanted = self._format
        finish_reason = None
        if one.finish_reason is not None:
            finish_reason = finish_name(one) if wanted.has_output else "length"
        return CompletionChoice(
            index=self._index,
            text=text,
            logprobs=self._run(output, entries) if wanted.has_logprobs else None,
            finish_reason=finish_reason,
            stop_reason=one.stop_reason if wanted.has_output else None,
            prompt_logprobs=self._prompt.listed(output.prompt_logprobs or ())
            if wanted.has_prompt_logprobs and is_first
            else UNSET,
            prompt_token_ids=list(output.prompt_token_ids) if wanted.has_token_ids and is_first else UNSET,
            token_ids=list(token_ids) if wanted.has_token_ids else UNSET,
        )

    def _is_ready(self, output: RequestOutput) -> bool:
        """Return whether an echoed prompt has its log-probabilities: of n choices, the first computes them for all."""
        if not self._format.has_logprobs or output.finished:
            return True
        return len(output.prompt_logprobs or ()) == len(output.prompt_token_ids) - 1

    def _run(self, output: RequestOutput, entries: tuple[TokenLogprobs, ...]) -> CompletionLogprobs:
        if self._logprobs is not None:
            return self._logprobs.output(entries)
        if self._echo is None:
            self._logprobs = self._prompt.output_writer(output)
            return self._logprobs.output(entries)
        before, self._logprobs = self._prompt.echoed(output)
        return joined(before, self._logprobs.output(entries))


@attrs.frozen(kw_only=True, eq=False)
class CompletionWriter:
    """Writes the answer to one request.

    Attributes:
        answer_id: Id of the answer.
        created: Creation time, seconds since 1970.
        model: Model name that the client asked for.
        fingerprint: Fingerprint of the system.
        tokenizer: Tokenizer of the model.
        body: Request, whose fields determine those of the answer.
        echoes: Text in front of the output of each prompt, or None.
        format: Parts that the client requested, from ``body``.
    """

    answer_id: str
    created: int
    model: str
    fingerprint: str
    tokenizer: Tokenizer
    body: CompletionRequest
    echoes: Sequence[str | None]
    format: CompletionFormat = attrs.field(
        init=False, default=attrs.Factory(lambda self: CompletionFormat.of(self.body, self.tokenizer), takes_self=True)
    )

    def whole(self, outputs: Sequence[RequestOutput]) -> TextCompletion:
        """Return the answer in one piece. Pure.

        Args:
            outputs: Finished outputs, one for each prompt.
        """
        choices = [
            choice
            for i, output in enumerate(outputs)
            for writer, one in zip(self._choices(i, len(output.outputs)), output.outputs, strict=True)
            if (choice := writer.take(output, one)) is not None
        ]
        answer = self._answer(choices, usage_of(outputs, counts_output=self.format.has_output))
        more = transfer_fields(outputs[0])
        return msgspec.structs.replace(answer, **more) if more else answer

    async def stream(
        self,
        generation: Generation,
        *,
        includes_usage: bool,
        is_continuous: bool,
        direct: DirectWrites | None = None,
    ) -> AsyncGenerator[bytes, None]:
        """Yield events; several at once if several choices of a prompt have new tokens.

        Args:
            generation: Engine requests.
            includes_usage: Whether one more event with the usage follows at the end.
            is_continuous: Whether every event has the usage.
            direct: Writes events of a stream with one choice directly while it is ready; None: all events are yielded.

        Raises:
            TrencadisError: An error of :meth:`Generation.outputs`.
        """
        encoder: ChunkEncoder[CompletionChoice] = ChunkEncoder(
            self._answer, includes_usage=includes_usage, is_continuous=is_continuous
        )
        writers = [self._choices(i, generation.params.n) for i in range(len(generation.prompts))]
        newest: dict[int, RequestOutput] = {}
        usage = functools.partial(usage_of, newest.values(), counts_output=self.format.has_output)

        def write(output: RequestOutput) -> bool:
            if direct is None or output.prompt_logprobs or not direct.is_ready:
                return False
            newest[0] = output
            choice = writers[0][0].take(output, output.outputs[0])
            if choice is not None:
                direct.write(encoder.chunk(choice, usage))
            return True

        async with aclosing(generation.outputs(streams=True, on_output=write if direct else None)) as outputs:
            async for i, output in outputs:
                newest[i] = output
                choices = await _taken(writers[i], output)
                events = [
                    encoder.chunk(choice, usage, **(transfer_fields(output) if j == 0 and choice.finish_reason else {}))
                    for j, choice in enumerate(choices)
                    if choice is not None
                ]
                if events:
                    yield b"".join(events)
        if includes_usage:
            yield encoder.last(usage())

    def _choices(self, i: int, n: int) -> list[ChoiceWriter]:
        prompt = PromptLogprobsWriter(self.format)
        return [ChoiceWriter(self.format, index=i * n + j, echo=self.echoes[i], prompt=prompt) for j in range(n)]

    def _answer(self, choices: list[CompletionChoice], usage: Any) -> TextCompletion:
        return TextCompletion(
            id=self.answer_id,
            created=self.created,
            model=self.model,
            system_fingerprint=self.fingerprint,
            choices=choices,
            usage=usage,
        )


async def _taken(writers: Sequence[ChoiceWriter], output: RequestOutput) -> list[CompletionChoice | None]:
    """Return the new part of each choice; on a thread if it may include log-probabilities of a whole prompt."""

    def take() -> list[CompletionChoice | None]:
        return [writer.take(output, one) for writer, one in zip(writers, output.outputs, strict=True)]

    return await asyncio.to_thread(take) if output.prompt_logprobs else take()
