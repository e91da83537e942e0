"""``LLM``: offline generation. The engine runs on the calling thread, or in a process of its own."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import EllipsisType, TracebackType
from typing import Any, Self, Unpack

from trencadis.client.beam_request import BeamRounds
from trencadis.client.client_request import ClientRequest, ignored_output
from trencadis.client.factory import configure, open_frontend
from trencadis.client.frontend import Frontend
from trencadis.client.prompts import (
    OnRefusal,
    Prompt,
    as_list,
    at_prompt,
    check_on_refusal,
    is_single,
    per_prompt,
    terms_per_prompt,
)
from trencadis.config import Config
from trencadis.console import track
from trencadis.errors import RequestError
from trencadis.records import (
    DEFAULT_TERMS,
    BeamSearchParams,
    Embedding,
    FinishReason,
    ListedTerms,
    ModelFacts,
    RequestOutput,
    RequestTerms,
    SamplingParams,
    TermKeywords,
)
from trencadis.registry import Registry
from trencadis.switching import change_table
from trencadis.text import Message, Tokenizer, encode_chat

__all__ = ["ClientStream", "LLM"]

logger = logging.getLogger("trencadis")

_DEFAULT_PARAMS = SamplingParams()


class LLM:
    """A language model that continues prompts, many at a time. Not for several threads; see ``AsyncLLM`` for that.

    Example::

        with LLM("demo", engine={"max_num_seqs": 8}) as llm:
            print(llm.generate("The old man looked at the sea and")[0].outputs[0].text)

    Args:
        model: A directory, a ``.gguf`` file, a hub id or ``"demo"``; or the whole table ``[model]`` as a mapping.
        config_file: A TOML file.
        tables: Tables of the configuration: ``scheduling={"name": "fcfs"}``. They win over file and environment.

    Attributes:
        tokenizer: Tokenizer of the model.
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
        self._open(open_frontend(config, registry))

    @classmethod
    def from_config(cls, config: Config, registry: Registry) -> LLM:
        """Return an ``LLM`` of a resolved configuration and its plugins.

        Raises:
            TrencadisError: The model cannot be loaded; see the constructor.
        """
        llm = cls.__new__(cls)
        llm._open(open_frontend(config, registry))  # noqa: SLF001 - its own class
        return llm

    def _open(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._num_requests = 0
        self._num_embeddings = 0
        self._beams = BeamRounds(frontend)
        self._abandoned: deque[ClientRequest] = deque()
        self.tokenizer: Tokenizer = frontend.tokenizer
        self.model: ModelFacts = frontend.engine.model
        self.max_model_len: int = frontend.engine.max_model_len

    @property
    def plan_hash(self) -> str:
        """Hash of the resolved plugins, versions and options; changes with the scheduling policy."""
        return self._frontend.engine.plan_hash

    # ------------------------------------------------------------------------------------------------- generate

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_refusal: OnRefusal = "ignore",
        use_progress: bool | None = None,
        **terms: Unpack[ListedTerms],
    ) -> list[RequestOutput]:
        """Continue prompts and return when all are done.

        A request that fails while it runs ends with ``FinishReason.ERROR`` and says why in ``error``; the others go on. So does, in a
        list, one that cannot be served, such as a prompt that is too long: it ends with ``FinishReason.IGNORED``.

        Args:
            prompts: Text or token ids, or a list of these.
            sampling_params: For all, or one for each prompt; the defaults of ``SamplingParams`` if None.
            on_refusal: Treatment of a list of which a prompt is refused: ``"ignore"`` that one, or ``"raise"`` and run none.
                A single prompt raises in any case.
            use_progress: Draw a progress bar; None: on a terminal.
            terms: Scheduling parameters by name: one value for all, or a list with one for each; None is the default.

        Returns:
            One output for each prompt, in order.

        Raises:
            InvalidRequestError: An argument is impossible, or has another length than ``prompts``.
            RequestError: A single prompt cannot be served; or one of a list, with ``on_refusal="raise"``: the message names its
                index, and none is left running.
            EngineEndedError: The engine was closed, died or hung.
        """
        check_on_refusal(on_refusal)
        listed = as_list(prompts)
        params = per_prompt(sampling_params, len(listed), name="sampling_params", default=_DEFAULT_PARAMS)
        listed_terms = terms_per_prompt(len(listed), terms)
        single = is_single(prompts)
        ignores = on_refusal == "ignore" and not single
        requests: list[ClientRequest | RequestOutput] = []
        for index, (prompt, one_params, one_terms) in enumerate(zip(listed, params, listed_terms, strict=True)):
            try:
                requests.append(self._submit(prompt, one_params, one_terms))
            except RequestError as error:
                if not ignores:
                    self._abort(_running(requests))
                    raise error if single else at_prompt(error, index) from None
                requests.append(ignored_output(str(self._num_requests), prompt, error))
                self._num_requests += 1
        running = _running(requests)
        self._run(running, stops_at_refusal=not ignores, use_progress=use_progress)
        if not ignores:
            for index, client in enumerate(running):
                if client.refusal is not None:
                    raise client.refusal if single else at_prompt(client.refusal, index)
        outputs = [one.output() if isinstance(one, ClientRequest) else one for one in requests]
        if ignores:
            _warn_of_ignored(outputs)
        return outputs

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        template_arguments: Mapping[str, Any] | None = None,
        on_refusal: OnRefusal = "ignore",
        use_progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them.

        Args:
            messages: ``[{"role": "user", "content": "..."}, ...]``, or a list of such lists.
            sampling_params: See :meth:`generate`.
            template_arguments: More names for the model's chat template.
            on_refusal: See :meth:`generate`; messages that the template refuses raise in any case.
            use_progress: See :meth:`generate`.

        Raises:
            InvalidRequestError: The model has no chat template, or it refuses the messages.
            RequestError: See :meth:`generate`.
        """
        # What is neither a conversation nor a list of them is refused by encode_chat, as a whole.
        several = isinstance(messages, list | tuple) and bool(messages) and isinstance(messages[0], list | tuple)
        chats: Sequence[Any] = messages if several else [messages]
        prompts: Any = [encode_chat(self.tokenizer, chat, template_arguments=template_arguments) for chat in chats]
        prompts = prompts if several else prompts[0]
        return self.generate(prompts, sampling_params, on_refusal=on_refusal, use_progress=use_progress)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        **terms: Unpack[TermKeywords],
    ) -> Iterator[RequestOutput]:
        """Continue one prompt and yield its output each time it has grown; the last one is ``finished``.

        The request is queued at once, so several streams run together, whichever is read. Closing the iterator ends it.

        Args:
            prompt: Text or token ids.
            sampling_params: The defaults of ``SamplingParams`` if None.
            terms: Scheduling parameters by name.

        Raises:
            RequestError: The prompt cannot be served.
        """
        client = self._submit(prompt, sampling_params or _DEFAULT_PARAMS, RequestTerms(**terms), streams=True)
        return ClientStream(client, step=self._step, abort=self._frontend.abort, abandoned=self._abandoned)

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> Iterator[RequestOutput]:
        """Answer one conversation and yield as :meth:`stream` does.

        Args:
            messages: ``[{"role": "user", "content": "..."}, ...]``.
            sampling_params: See :meth:`stream`.
            template_arguments: More names for the model's chat template.

        Raises:
            InvalidRequestError: The model has no chat template, or it refuses the messages.
        """
        return self.stream(
            encode_chat(self.tokenizer, messages, template_arguments=template_arguments), sampling_params
        )

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams] | None = None,
        *,
        terms: RequestTerms | None = None,
    ) -> list[RequestOutput]:
        """Search the likeliest continuations of prompts: best first, each with its ``score``. Nothing is drawn.

        Every step asks for one token of each beam, with requests that share their beginnings through the prefix cache; what that
        costs is in [Choose among texts](do/choosing.md). A search that fails ends with one output that has ``FinishReason.ERROR``.

        Args:
            prompts: Text or token ids, or a list of these; all are searched side by side.
            params: For all, or one for each prompt; the defaults of ``BeamSearchParams`` if None.
            terms: Under which all of them run; the defaults of ``RequestTerms`` if None.

        Returns:
            One output for each prompt, in order; fewer than ``n`` continuations only if there are no more.

        Raises:
            RequestError: See :meth:`generate`.
            EngineEndedError: The engine was closed, died or hung.
        """
        listed = as_list(prompts)
        given = per_prompt(params, len(listed), name="params", default=BeamSearchParams())
        return self._beams.search(listed, given, terms=terms or DEFAULT_TERMS, run=self._run)

    def embed(self, prompts: Prompt | Sequence[Prompt]) -> list[Embedding]:
        """Return one vector for each text, in order.

        Args:
            prompts: Text or token ids, or a list of these.

        Raises:
            RequestError: A text is at fault, or the model does not embed.
            BackendError: A text could not be embedded.
        """
        future: Future[list[Embedding]] = Future()
        # Numbers of their own: what is generated must not depend on what was embedded.
        request_id = f"embedding-{self._num_embeddings}"
        self._num_embeddings += 1
        self._frontend.embed(as_list(prompts), request_id=request_id, future=future)
        try:
            while not future.done():
                self._step()
        finally:
            self._frontend.drop_embeddings(request_id)
        return future.result()

    # ----------------------------------------------------------------------------------------------- scheduling

    def set_scheduling(
        self,
        name: str | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        shadow: str | EllipsisType | None = ...,
    ) -> dict[str, Any]:
        """Put another scheduling policy in force, also between two outputs of :meth:`stream`; see ``AsyncLLM.set_scheduling``.

        Raises:
            ConfigError: No such policy, or an option that its table does not have.
            PluginError: It cannot be built. In both cases nothing has changed.
        """
        return self._frontend.control(
            "set_scheduling", table=change_table(name, options, shadow), source="set_scheduling", may_import=True
        )

    def scheduling(self) -> dict[str, Any]:
        """Return which policy schedules; see ``AsyncLLM.scheduling``."""
        return self._frontend.control("scheduling")

    def totals(self) -> dict[str, Any]:
        """Return what the engine has counted since it was opened; see ``AsyncLLM.totals``."""
        return self._frontend.control("totals")

    def explain(self, request_id: str) -> dict[str, Any]:
        """Return why a request was or was not scheduled in each of the last steps; see ``AsyncLLM.explain``.

        Args:
            request_id: ``"0"`` for the first prompt that this object was given, and so on.

        Raises:
            InvalidRequestError: It was never seen, or the record does not reach back to it.
        """
        return self._frontend.control("explain", request_id=request_id)

    def flight_record(self) -> dict[str, Any]:
        """Write what the engine did in its last steps to a file, for ``trencadis replay``; see ``AsyncLLM.flight_record``.

        Raises:
            InvalidRequestError: Nothing is recorded: ``flight_recorder.num_steps`` is 0.
            BackendError: The file could not be written.
        """
        return self._frontend.control("flight_record")

    # -------------------------------------------------------------------------------------------------- closing

    def close(self) -> None:
        """End every request and free the device; may be called twice."""
        self._frontend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------- innards

    def _submit(
        self, prompt: Prompt, params: SamplingParams, terms: RequestTerms, *, streams: bool = False
    ) -> ClientRequest:
        # Numbers in order, so that unseeded requests draw the same in every run of the same program.
        request_id = str(self._num_requests)
        client = self._frontend.submit(prompt, params, request_id=request_id, terms=terms, streams=streams)
        self._num_requests += 1
        return client

    def _run(
        self, clients: list[ClientRequest], *, stops_at_refusal: bool = True, use_progress: bool | None = False
    ) -> None:
        waiting = {client for client in clients if not client.is_finished}
        try:
            with track("Generating", total=len(clients), unit="prompts", show=use_progress) as advance:
                while waiting:
                    ended = [client for client in self._step() if client in waiting and client.is_finished]
                    if ended:
                        waiting.difference_update(ended)
                        advance(len(clients) - len(waiting))
                        if stops_at_refusal and [client for client in ended if client.refusal is not None]:
                            return
        finally:
            self._abort(waiting)

    def _step(self) -> list[ClientRequest]:
        while self._abandoned:
            self._frontend.abort(self._abandoned.popleft())
        return self._frontend.step()

    def _abort(self, clients: Iterable[ClientRequest]) -> None:
        for client in clients:
            self._frontend.abort(client)


def _warn_of_ignored(outputs: Sequence[RequestOutput]) -> None:
    ignored = [
        i for i, one in enumerate(outputs) if one.outputs and one.outputs[0].finish_reason is FinishReason.IGNORED
    ]
    if ignored:
        first = ignored[0]
        logger.warning(
            "%d of %d prompts were ignored; prompts[%d]: %s", len(ignored), len(outputs), first, outputs[first].error
        )


def _running(requests: list[ClientRequest | RequestOutput]) -> list[ClientRequest]:
    """Return those that the engine has."""
    return [request for request in requests if isinstance(request, ClientRequest)]


class ClientStream(Iterator[RequestOutput]):
    """Iterator over the outputs of one request; steps the engine until the output has changed.

    Args:
        client: The request, queued.
        step: Takes a step of the engine.
        abort: Ends a request.
        abandoned: Gets the request if it is not read any more; the thread that steps the engine ends what is in there first.
    """

    def __init__(
        self,
        client: ClientRequest,
        *,
        step: Callable[[], list[ClientRequest]],
        abort: Callable[[ClientRequest], None],
        abandoned: deque[ClientRequest],
    ) -> None:
        self._client = client
        self._step = step
        self._abort = abort
        self._abandoned = abandoned
        self._done = False
        self._num_seen = 0

    def __next__(self) -> RequestOutput:
        if self._done:
            raise StopIteration
        while not self._has_changed():
            self._step()
        self._num_seen = self._client.num_changes
        self._done = self._client.is_finished
        if self._done and self._client.refusal is not None:
            raise self._client.refusal
        return self._client.output()

    def close(self) -> None:
        """End the request if it runs, and the iteration."""
        self._done = True
        self._abort(self._client)

    def __del__(self) -> None:
        # Garbage is collected anywhere, also within a step: the engine must not change now, but before its next step.
        if not self._done:
            self._abandoned.append(self._client)

    def _has_changed(self) -> bool:
        return self._client.is_finished or self._client.num_changes > self._num_seen
