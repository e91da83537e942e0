"""``AsyncLLM``: generation for coroutines. The engine runs on a thread, or in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

import attrs

from trencadis.client.beam_request import BeamRequest, search_beams
from trencadis.client.control import EngineControl, no_answer
from trencadis.client.dispatcher import Embed, MetricsRequest, Submission
from trencadis.client.factory import configure, open_runner
from trencadis.client.output_stream import OutputStream
from trencadis.client.prompts import Prompt
from trencadis.config import Config
from trencadis.errors import InvalidRequestError
from trencadis.records import (
    DEFAULT_TERMS,
    BeamSearchParams,
    Embedding,
    ModelFacts,
    RequestOutput,
    RequestTerms,
    SamplingParams,
    TermKeywords,
)
from trencadis.registry import Registry
from trencadis.text import Message, Tokenizer, render_chat

__all__ = ["AsyncLLM"]


class AsyncLLM(EngineControl):
    """A language model for asyncio. The constructor blocks until the model is ready.

    Example::

        async with AsyncLLM("demo") as llm:
            async for output in llm.generate("The old man looked at the sea and"):
                print(output.outputs[0].text)

    Args:
        model: A directory, a ``.gguf`` file, a hub id or ``"demo"``; or the whole table ``[model]`` as a mapping.
        config_file: A TOML file.
        tables: Tables of the configuration: ``scheduling={"name": "fcfs"}``. They win over file and environment.

    Attributes:
        tokenizer: Tokenizer of the model; may be used from any thread.
        model: Name of the model that was loaded.
        max_model_len: Longest sequence, prompt and output, tokens.

    Raises:
        ConfigError: The configuration cannot be used.
        PluginError: A component cannot be chosen, built or combined with the others.
        BackendError: The model cannot be loaded, or the device has no room for it.
    """

    def __init__(
        self, model: str | Mapping[str, Any] | None = None, *, config_file: str | Path | None = None, **tables: Any
    ) -> None:
        config, registry = configure(model, config_file=config_file, tables=tables)
        self._open(config, registry)

    @classmethod
    def from_config(cls, config: Config, registry: Registry) -> AsyncLLM:
        """Return an ``AsyncLLM`` of a resolved configuration and its plugins. Blocks until the model is ready.

        Raises:
            TrencadisError: The model cannot be loaded; see the constructor.
        """
        llm = cls.__new__(cls)
        llm._open(config, registry)  # noqa: SLF001 - its own class
        return llm

    def _open(self, config: Config, registry: Registry) -> None:
        super().__init__(open_runner(config, registry))
        self._numbers = itertools.count()
        frontend = self._runner.frontend
        self.tokenizer: Tokenizer = frontend.tokenizer
        self.model: ModelFacts = frontend.engine.model
        self.max_model_len: int = frontend.engine.max_model_len

    @property
    def plan_hash(self) -> str:
        """Hash of the resolved plugins, versions and options; changes with the scheduling policy."""
        return self._runner.frontend.engine.plan_hash

    @property
    def is_alive(self) -> bool:
        """False once the engine was closed or has failed."""
        return self._runner.is_alive

    @property
    def failure(self) -> str:
        """Why the engine ended, in words; empty while it is alive."""
        return self._runner.failure

    @property
    def stalled(self) -> str:
        """Where the engine has made no progress for too long, in words; empty while all is well. It may go on, or is killed."""
        return self._runner.stalled

    @property
    def num_live(self) -> int:
        """Requests of :meth:`generate` that have not ended."""
        return self._runner.dispatcher.num_live

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        terms: RequestTerms | None = None,
        streams: bool = True,
        on_output: Callable[[RequestOutput], bool] | None = None,
        **named: Unpack[TermKeywords],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a prompt and yield its output when it has grown; the last one is ``finished``.

        Outputs are cumulative; a slow reader is given the newest. Leaving the loop, closing the generator or cancelling the
        task ends the request. One that fails while it runs ends with ``FinishReason.ERROR`` and says why in ``error``.

        Args:
            prompt: Text or token ids.
            sampling_params: The defaults of ``SamplingParams`` if None.
            request_id: Unique among live requests; numbered if None.
            terms: Scheduling parameters as one value, instead of those by name; None: those by name.
            streams: False: only the finished output is wanted.
            on_output: Called on the event loop with each output for which the loop over this generator waits, but the finished one;
                True: it is done with and is not yielded, so that no task is woken for it. It must not wait.
            named: Scheduling parameters by name.

        Raises:
            RequestError: The prompt cannot be served, or ``terms`` come with scheduling parameters by name; no other request suffers.
            EngineEndedError: The engine was closed, died or hung.
        """
        own = RequestTerms(**named) if named else DEFAULT_TERMS
        if terms is not None and own != DEFAULT_TERMS:
            raise InvalidRequestError(
                "terms and scheduling parameters by name were both given.", hint="Give one of them."
            )
        stream = OutputStream(asyncio.get_running_loop(), on_output)
        request_id = f"async-{next(self._numbers)}" if request_id is None else request_id
        submission = Submission(
            prompt=prompt,
            params=sampling_params or SamplingParams(),
            request_id=request_id,
            terms=own if terms is None else terms,
            streams=streams,
            stream=stream,
        )
        self._runner.send(submission)
        is_finished = False
        try:
            while not is_finished:
                if stream.is_empty:
                    await stream.changed()
                output = stream.take()
                if output is not None:
                    is_finished = output.finished
                    yield output
        finally:
            if not is_finished:
                self._runner.abort(request_id, only=stream)

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        template_arguments: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        streams: bool = True,
        **named: Unpack[TermKeywords],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation; yields as :meth:`generate` does.

        Args:
            messages: ``[{"role": "user", "content": "..."}, ...]``.
            sampling_params: See :meth:`generate`.
            template_arguments: More names for the model's chat template.
            request_id: See :meth:`generate`.
            streams: See :meth:`generate`.
            named: See :meth:`generate`.

        Raises:
            InvalidRequestError: The model has no chat template, or it refuses the messages.
        """
        rendered = render_chat(self.tokenizer, messages, template_arguments=template_arguments)
        prompt = self.tokenizer.encode_rendered(await asyncio.wrap_future(rendered))
        outputs = self.generate(prompt, sampling_params, request_id=request_id, streams=streams, **named)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                yield output

    async def beam_search(
        self,
        prompt: Prompt,
        params: BeamSearchParams | None = None,
        *,
        request_id: str | None = None,
        terms: RequestTerms | None = None,
    ) -> RequestOutput:
        """Search the likeliest continuations of a prompt, as ``LLM.beam_search`` does. Cancelling the task ends the search.

        Args:
            prompt: Text or token ids.
            params: The defaults of ``BeamSearchParams`` if None.
            request_id: Unique among live requests; the engine's requests are named after it. Numbered if None.
            terms: Under which the search runs; the defaults of ``RequestTerms`` if None.

        Raises:
            TrencadisError: See :meth:`generate`.
        """
        request_id = f"async-{next(self._numbers)}" if request_id is None else request_id
        search = BeamRequest.on(self._runner.frontend, prompt, params or BeamSearchParams(), request_id=request_id)
        own = attrs.evolve(terms or DEFAULT_TERMS, transfer_params=None)

        async def ask(beam: Prompt, step_params: SamplingParams, name: str) -> RequestOutput:
            return [one async for one in self.generate(beam, step_params, request_id=name, streams=False, terms=own)][
                -1
            ]

        return await search_beams(search, ask)

    async def embed(self, prompts: Sequence[Prompt]) -> list[Embedding]:
        """Return one vector for each text, in order.

        Args:
            prompts: Text or token ids, each.

        Raises:
            RequestError: A text is at fault, or the model does not embed.
            EngineEndedError: The engine was closed, died or hung.
            BackendError: A text could not be embedded.
        """
        command = Embed(prompts=tuple(prompts), request_id=f"embedding-{next(self._numbers)}")
        self._runner.send(command)
        try:
            return await asyncio.wrap_future(command.future)
        except asyncio.CancelledError:
            self._runner.abort(command.request_id)
            raise

    async def metrics(self, timeout_s: float = 2.0) -> str:
        """Return what the engine's observers measured, in Prometheus' text format.

        Args:
            timeout_s: The longest wait for the engine, which answers between steps.

        Raises:
            EngineEndedError: The engine was closed, died or hung.
            BackendError: It did not answer in time.
        """
        command = MetricsRequest()
        self._runner.send(command)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(command.future), timeout_s)
        except TimeoutError:
            raise no_answer(timeout_s) from None

    def abort(self, request_id: str) -> None:
        """End a request from anywhere; its reader gets what there is, with ``FinishReason.ABORT``.

        Nothing happens if there is no such request.
        """
        self._runner.abort(request_id)

    async def close(self) -> None:
        """End every request, free the device, and wait for the engine's end; may be called twice."""
        await asyncio.to_thread(self._runner.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
