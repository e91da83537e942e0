"""Beam searches of several prompts side by side, for a caller that steps the engine itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import attrs

from trencadis.client.beam_request import BeamRequest
from trencadis.client.client_request import ClientRequest
from trencadis.client.frontend import Frontend
from trencadis.client.prompts import Prompt, at_prompt
from trencadis.errors import RequestError
from trencadis.records import BeamSearchParams, RequestOutput, RequestTerms

__all__ = ["BeamRounds"]


class BeamRounds:
    """Runs rounds: one request for each live beam of each prompt, and all of them to their end before the next.

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
            terms: Of every request.
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
        terms = attrs.evolve(terms, transfer_params=None)  # of a beam that grows, nobody loads one prefix
        return self._frontend.submit(prompt, search.step_params, request_id=self._next_id(), terms=terms)

    def _next_id(self) -> str:
        # Names of their own: what is drawn elsewhere must not depend on what was searched.
        return f"beam-{next(self._numbers)}"


def _named(error: RequestError, index: int, num_prompts: int) -> RequestError:
    return at_prompt(error, index) if num_prompts > 1 else error
