"""Beam search as engine requests: one token of each live beam in a round, by ``LLM`` (:class:`BeamRounds`) and ``AsyncLLM``."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import attrs

from trencadis.client.beam_search import BeamSearch, EndedBeam
from trencadis.client.client_request import ClientRequest
from trencadis.client.frontend import Frontend
from trencadis.client.prompts import Prompt, as_token_ids, at_prompt
from trencadis.errors import InvalidRequestError, RequestError
from trencadis.records import (
    MAX_LOGPROBS,
    BeamSearchParams,
    CompletionOutput,
    FinishReason,
    ModelFacts,
    RequestOutput,
    RequestTerms,
    SamplingParams,
    TokenLogprobs,
)
from trencadis.text import Detokenizer, Tokenizer

if TYPE_CHECKING:
    from trencadis.client.beam_search import Beam
    from trencadis.client.frontend import Frontend

__all__ = ["Generate", "BeamRequest", "BeamRounds", "search_beams", "together"]


class BeamRequest:
    """Beam search of one prompt: the engine requests of each round, one token for each live beam, and the output.

    A beam's prompt is the prompt and its tokens so far. All but the last, incomplete block of it come from the prefix cache, so a round
    costs each beam up to a block of tokens and the way of a request. Measured on one CPU core with the demo model, blocks of 16 and 64
    tokens: four beams take 1.8 times as long as four sampled texts, eight beams 2.2 times. Without prefix caching, all of each beam is
    computed anew in every round.

    Args:
        prompt: Text or token ids.
        params: Parameters of the search.
        request_id: Id of the output.
        tokenizer: Tokenizer of the model.
        model: Has the tokens that end a text.
        max_model_len: Longest sequence, tokens.

    Attributes:
        request_id: Id of the output.
        step_params: Sampling parameters of the engine requests.

    Raises:
        InvalidRequestError: Beam width and end tokens together are more than the engine reports log-probabilities of.
    """

    def __init__(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        *,
        request_id: str,
        tokenizer: Tokenizer,
        model: ModelFacts,
        max_model_len: int,
    ) -> None:
        self.request_id = request_id
        self._prompt = prompt if isinstance(prompt, str) else None
        self._ids = tokenizer.encode(prompt) if isinstance(prompt, str) else as_token_ids(prompt)
        self._params = params
        self._tokenizer = tokenizer
        self._ends = frozenset(() if params.ignore_eos else model.eos_token_ids) | set(params.stop_token_ids)
        room = max(1, max_model_len - len(self._ids))
        self._search = BeamSearch(
            params,
            end_token_ids=self._ends,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
        )
        if self._search.num_candidates > MAX_LOGPROBS:
            raise InvalidRequestError(
                f"beam_width = {params.beam_width} and {len(self._ends)} tokens that end a text need "
                f"{self._search.num_candidates} alternatives at each token; there are at most {MAX_LOGPROBS}.",
                hint=f"Lower beam_width to {MAX_LOGPROBS - len(self._ends)}.",
            )
        # The token that comes with them does not matter.
        self.step_params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=self._search.num_candidates)
        self._num_cached_tokens: int | None = None
        self._num_approximate_tokens = 0
        self._failure: tuple[FinishReason, str] | None = None

    @classmethod
    def on(cls, frontend: Frontend, prompt: Prompt, params: BeamSearchParams, *, request_id: str) -> BeamRequest:
        """Return a search with the model of a frontend; may be called from any thread.

        Raises:
            InvalidRequestError: The parameters cannot be used; see the constructor.
        """
        engine = frontend.engine
        return cls(
            prompt,
            params,
            request_id=request_id,
            tokenizer=frontend.tokenizer,
            model=attrs.evolve(engine.model, eos_token_ids=frontend.end_token_ids),
            max_model_len=engine.max_model_len,
        )

    @property
    def is_finished(self) -> bool:
        """True once there are no live beams, or one failed."""
        return not self._search.live or self._failure is not None

    def prompts(self) -> list[tuple[int, ...]]:
        """Return the prompt of each live beam, to be continued by one token with ``step_params``. Pure."""
        return [self._ids + beam.token_ids() for beam in self._search.live]

    def take(self, outputs: Sequence[RequestOutput]) -> None:
        """Advance the search by the finished output of each live beam, in the order of :meth:`prompts`.

        Raises:
            InvalidRequestError: The sampler reports no log-probabilities.
        """
        if self._num_cached_tokens is None:
            self._num_cached_tokens = outputs[0].num_cached_tokens
        self._num_approximate_tokens = max(
            self._num_approximate_tokens, *(one.num_approximate_tokens for one in outputs)
        )
        for output in outputs:
            reason = output.outputs[0].finish_reason
            if reason in (FinishReason.ERROR, FinishReason.INVALID, FinishReason.ABORT):
                self._failure = reason, output.error
                return
        entries = [entry for output in outputs for entry in output.outputs[0].logprobs or ()]
        if len(entries) != len(outputs) or not all(entry.top_token_ids for entry in entries):
            raise InvalidRequestError(
                "beam search needs log-probabilities, and the sampler of this engine reports none.",
                hint='Choose one that does, such as [sampling] name = "standard".',
            )
        self._search.advance(entries)

    def output(self) -> RequestOutput:
        """Return the best continuations; if a beam failed or was aborted, one without text that says so. Pure."""
        if self._failure is None:
            best = self._search.ended[: self._params.num_returned]
            outputs = tuple(self._completion(index, ended) for index, ended in enumerate(best))
        else:
            outputs = (CompletionOutput(index=0, text="", token_ids=(), finish_reason=self._failure[0]),)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._ids,
            outputs=outputs,
            finished=True,
            num_cached_tokens=self._num_cached_tokens or 0,
            error="" if self._failure is None else self._failure[1],
            num_approximate_tokens=self._num_approximate_tokens,
        )

    # ------------------------------------------------------------------------------------------------- innards

    def _completion(self, index: int, ended: EndedBeam) -> CompletionOutput:
        path = ended.beam.path()
        token_ids = tuple(beam.token_id for beam in path)
        stop = token_ids[-1] if token_ids[-1] in self._ends else None
        is_hidden = stop is not None and not self._params.include_stop_str_in_output
        text = Detokenizer(
            self._tokenizer, skip_special_tokens=self._params.skip_special_tokens, prompt_token_ids=self._ids
        )
        return CompletionOutput(
            index=index,
            text=text.add(token_ids[:-1] if is_hidden else token_ids) + text.flush(),
            token_ids=token_ids,
            finish_reason=FinishReason.LENGTH if stop is None else FinishReason.STOP,
            stop_reason=stop if stop in self._params.stop_token_ids else None,
            logprobs=None
            if self._params.logprobs is None
            else tuple(self._logprobs(index, path, self._params.logprobs)),
            score=ended.score,
        )

    def _logprobs(self, index: int, path: Sequence[Beam], num_top: int) -> list[TokenLogprobs]:
        """Return the log-probabilities along a path: at each token those of its parent beam. Pure."""
        entries = []
        for position, beam in enumerate(path, start=len(self._ids)):
            if beam.entry is None:
                continue
            offered = dict(zip(beam.entry.top_token_ids, beam.entry.top_logprobs, strict=True))
            logprob = offered[beam.token_id]
            entries.append(
                TokenLogprobs(
                    index=index,
                    position=position,
                    token_id=beam.token_id,
                    logprob=logprob,
                    rank=1 + sum(other > logprob for other in offered.values()),
                    top_token_ids=beam.entry.top_token_ids[:num_top],
                    top_logprobs=beam.entry.top_logprobs[:num_top],
                )
            )
        return entries


class BeamRounds:
    """Searches several prompts for a caller that steps the engine: a round runs one request for each live beam of each prompt.

    Args:
        frontend: Serves the requests.
    """

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._numbers = itertools.count()

    def search(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[BeamSearchParams],
        *,
        terms: RequestTerms,
        run: Callable[[list[ClientRequest]], None],
    ) -> list[RequestOutput]:
        """Return the output of each prompt, in order.

        Args:
            prompts: Text or token ids, each.
            params: One for each.
            terms: Terms of every request.
            run: Steps the engine until all of some requests have ended, or one was refused.

        Raises:
            RequestError: A prompt cannot be served; the message names its index if there are several. No request is left in the
                engine.
            EngineEndedError: The engine was closed, died or hung.
        """
        searches: list[BeamRequest] = []
        try:
            for prompt, one_params in zip(prompts, params, strict=True):
                searches.append(BeamRequest.on(self._frontend, prompt, one_params, request_id=self._next_id()))
        except RequestError as error:
            raise _named(error, len(searches), len(prompts)) from None
        while any(not search.is_finished for search in searches):
            self._run_round(searches, terms, run)
        return [search.output() for search in searches]

    def _run_round(
        self, searches: Sequence[BeamRequest], terms: RequestTerms, run: Callable[[list[ClientRequest]], None]
    ) -> None:
        clients: dict[int, list[ClientRequest]] = {}
        index = -1
        try:
            for index, search in enumerate(searches):
                if not search.is_finished:
                    mine = clients[index] = []
                    for beam in search.prompts():
                        mine.append(self._submit(beam, search, terms))  # noqa: PERF401 - kept if a later one fails
            run([client for mine in clients.values() for client in mine])
            for index, mine in clients.items():
                for client in mine:
                    if client.refusal is not None:
                        raise client.refusal
                searches[index].take([client.output() for client in mine])
        except RequestError as error:
            raise _named(error, index, len(searches)) from None
        finally:
            for client in (client for mine in clients.values() for client in mine):
                self._frontend.abort(client)

    def _submit(self, prompt: tuple[int, ...], search: BeamRequest, terms: RequestTerms) -> ClientRequest:
        terms = attrs.evolve(terms, transfer_params=None)  # a beam that grows has no prefix to load
        return self._frontend.submit(prompt, search.step_params, request_id=self._next_id(), terms=terms)

    def _next_id(self) -> str:
        # Separate ids: unseeded requests draw by their id, which must not depend on searches.
        return f"beam-{next(self._numbers)}"


def _named(error: RequestError, index: int, num_prompts: int) -> RequestError:
    return at_prompt(error, index) if num_prompts > 1 else error


_T = TypeVar("_T")
Generate: TypeAlias = Callable[[Prompt, SamplingParams, str], Coroutine[Any, Any, RequestOutput]]
"""Generates for a prompt under a request id, to the end."""


async def search_beams(search: BeamRequest, generate: Generate) -> RequestOutput:
    """Run a search to its end; cancelling it ends the requests that run for it.

    Args:
        search: New; its request id is the beginning of those of the beams.
        generate: Runs a request.

    Raises:
        TrencadisError: Whatever ``generate`` raises for a beam; the others have been ended.
    """
    num_rounds = 0
    while not search.is_finished:
        beams = enumerate(search.prompts())
        names = f"{search.request_id}/{num_rounds}"
        search.take(await together(generate(prompt, search.step_params, f"{names}/{beam}") for beam, prompt in beams))
        num_rounds += 1
    return search.output()


async def together(coroutines: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Run coroutines concurrently and return their results in order; if one fails, or the caller is cancelled, all end.

    Raises:
        BaseException: The first that one of them raised, as it was; the others have ended by then.
    """
    tasks = [asyncio.ensure_future(one) for one in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
