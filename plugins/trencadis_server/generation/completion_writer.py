"""Outputs of the engine as text completions, whole or in chunks. Choice j of prompt i has the index i x n + j."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import attrs
import msgspec

from trencadis.api import Tokenizer
from trencadis.records import RequestOutput
from trencadis_server.generation.completion_choice import ChoiceWriter, CompletionFormat, PromptLogprobsWriter
from trencadis_server.generation.generation import Generation, transfer_fields, usage_of
from trencadis_server.generation.sse import ChunkEncoder
from trencadis_server.protocol.completion_answers import CompletionChoice, TextCompletion
from trencadis_server.protocol.completions import CompletionRequest

__all__ = ["CompletionWriter"]


@attrs.frozen(kw_only=True, eq=False)
class CompletionWriter:
    """Writes the answer to one request.

    Attributes:
        answer_id: Of the answer.
        created: Seconds since 1970.
        model: The name the client asked for.
        fingerprint: Of the system.
        tokenizer: Of the model.
        body: The request, whose fields say what the answer has.
        echoes: For each prompt the text to stand before its output, or None.
        format: What the client wants to see, from ``body``.
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
            outputs: Finished, one for each prompt.
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
        self, generation: Generation, *, includes_usage: bool, is_continuous: bool
    ) -> AsyncGenerator[bytes, None]:
        """Yield events; several at once if several choices of a prompt have grown.

        Args:
            generation: What runs.
            includes_usage: One more event with the usage, at the end.
            is_continuous: Every event has the usage.

        Raises:
            TrencadisError: As :meth:`Generation.outputs`.
        """
        encoder: ChunkEncoder[CompletionChoice] = ChunkEncoder(
            self._answer, includes_usage=includes_usage, is_continuous=is_continuous
        )
        writers = [self._choices(i, generation.params.n) for i in range(len(generation.prompts))]
        newest: dict[int, RequestOutput] = {}
        usage = functools.partial(usage_of, newest.values(), counts_output=self.format.has_output)
        async with aclosing(generation.outputs(streams=True)) as outputs:
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
    """Return what is new of each choice; on a thread if that may be the log-probabilities of a whole prompt."""

    def take() -> list[CompletionChoice | None]:
        return [writer.take(output, one) for writer, one in zip(writers, output.outputs, strict=True)]

    return await asyncio.to_thread(take) if output.prompt_logprobs else take()
