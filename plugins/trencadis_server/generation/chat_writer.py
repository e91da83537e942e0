"""Chat answers from outputs of the engine, whole or in chunks."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

import attrs
from msgspec import UNSET

from trencadis.api import Tokenizer
from trencadis.records import CompletionOutput, RequestOutput
from trencadis_server.generation.connection import DirectWrites
from trencadis_server.generation.generation import Generation, transfer_fields, usage_of
from trencadis_server.generation.logprobs import chat_logprobs, prompt_logprobs
from trencadis_server.generation.sse import ChunkEncoder, Progress, finish_name
from trencadis_server.protocol.chat import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    ChunkChoice,
    Delta,
)

__all__ = ["ChatWriter"]


@attrs.frozen(kw_only=True, eq=False)
class ChatWriter:
    """Writes the answer to one request.

    Attributes:
        answer_id: Id of the answer.
        created: Creation time, seconds since 1970.
        model: Model name that the client asked for.
        fingerprint: Fingerprint of the system.
        tokenizer: Tokenizer of the model.
        body: Request, whose fields determine those of the answer.
    """

    answer_id: str
    created: int
    model: str
    fingerprint: str
    tokenizer: Tokenizer
    body: ChatRequest

    def whole(self, output: RequestOutput) -> ChatCompletion:
        """Return the answer in one piece. Pure."""
        return ChatCompletion(
            id=self.answer_id,
            created=self.created,
            model=self.model,
            system_fingerprint=self.fingerprint,
            choices=[self._choice(one) for one in output.outputs],
            usage=usage_of([output]),
            prompt_logprobs=prompt_logprobs(output.prompt_logprobs or (), self.tokenizer)
            if self.body.prompt_logprobs is not None
            else UNSET,
            prompt_token_ids=list(output.prompt_token_ids) if self.body.return_token_ids else UNSET,
            **transfer_fields(output),
        )

    async def stream(
        self,
        generation: Generation,
        *,
        includes_usage: bool,
        is_continuous: bool,
        direct: DirectWrites | None = None,
    ) -> AsyncGenerator[bytes, None]:
        """Yield events; several at once if several choices have new tokens.

        Args:
            generation: Engine requests, with one prompt.
            includes_usage: Whether one more event with the usage follows at the end.
            is_continuous: Whether every event has the usage.
            direct: Writes events of a stream with one choice directly while it is ready; None: all events are yielded.

        Raises:
            TrencadisError: An error of :meth:`Generation.outputs`.
        """
        encoder: ChunkEncoder[ChunkChoice] = ChunkEncoder(
            self._chunk, includes_usage=includes_usage, is_continuous=is_continuous
        )
        sent = [
            Progress(has_token_ids=bool(self.body.logprobs or self.body.return_token_ids))
            for _ in range(generation.params.n)
        ]
        is_open = False

        def chunks(output: RequestOutput) -> list[bytes]:
            usage = functools.partial(usage_of, [output])
            return [
                encoder.chunk(
                    choice, usage, **(transfer_fields(output) if choice.index == 0 and choice.finish_reason else {})
                )
                for choice in self._new_chunks(output, sent)
            ]

        def write(output: RequestOutput) -> bool:
            if direct is None or not is_open or not direct.is_ready:
                return False
            data = b"".join(chunks(output))
            if data:
                direct.write(data)
            return True

        async with aclosing(generation.outputs(streams=True, on_output=write if direct else None)) as outputs:
            async for _, output in outputs:
                events = [] if is_open else self._opening(output, encoder)
                is_open = True
                events += chunks(output)
                if output.finished:
                    events.append(encoder.last(usage_of([output])))
                if events:
                    yield b"".join(events)

    def _opening(self, output: RequestOutput, encoder: ChunkEncoder[ChunkChoice]) -> list[bytes]:
        """Return the first event of each choice, which has the role and no text."""
        usage = functools.partial(usage_of, [output])
        prompt = {"prompt_token_ids": list(output.prompt_token_ids)} if self.body.return_token_ids else {}
        choices = [ChunkChoice(index=one.index, delta=Delta(role="assistant", content="")) for one in output.outputs]
        return [
            encoder.chunk(choices[0], usage, **prompt),
            *(encoder.chunk(choice, usage) for choice in choices[1:]),
        ]

    def _new_chunks(self, output: RequestOutput, sent: list[Progress]) -> Iterator[ChunkChoice]:
        """Yield the new part of each choice; its end is a chunk of its own."""
        for one, progress in zip(output.outputs, sent, strict=True):
            if progress.is_finished:
                continue
            text, token_ids, entries = progress.take(one)
            if text or token_ids:
                yield ChunkChoice(
                    index=one.index,
                    delta=Delta(content=text),
                    logprobs=chat_logprobs(entries, self.tokenizer) if self.body.logprobs else None,
                    token_ids=list(token_ids) if self.body.return_token_ids else UNSET,
                )
            if one.finish_reason is not None:
                progress.is_finished = True
                yield ChunkChoice(
                    index=one.index,
                    delta=Delta(),
                    finish_reason=finish_name(one),
                    stop_reason=one.stop_reason,
                )

    def _choice(self, one: CompletionOutput) -> ChatChoice:
        return ChatChoice(
            index=one.index,
            message=AssistantMessage(content=one.text),
            logprobs=chat_logprobs(one.logprobs or (), self.tokenizer) if self.body.logprobs else None,
            finish_reason=finish_name(one),
            stop_reason=one.stop_reason,
            token_ids=list(one.token_ids) if self.body.return_token_ids else UNSET,
        )

    def _chunk(self, choices: list[ChunkChoice], usage: Any) -> ChatChunk:
        return ChatChunk(
            id=self.answer_id,
            created=self.created,
            model=self.model,
            system_fingerprint=self.fingerprint,
            choices=choices,
            usage=usage,
        )
