"""Engine and tokenizer together: requests of clients in, their outputs out. Single-threaded, as the engine is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trencadis.errors import InvalidRequestError, RequestError
from trencadis.front.client_request import ClientRequest
from trencadis.front.output_processor import OutputProcessor
from trencadis.front.prompts import Prompt, as_token_ids
from trencadis.records import Request, SamplingParams
from trencadis.text import Tokenizer

if TYPE_CHECKING:
    from trencadis.engine.engine import Engine

__all__ = ["Frontend"]


class Frontend:
    """What serves clients from one engine. All methods are called from the engine's thread.

    Args:
        engine: Ready for requests.
        tokenizer: Of its model.

    Attributes:
        engine: As given.
        tokenizer: As given.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self._processor = OutputProcessor(engine.stop)
        self._live: dict[str, ClientRequest] = {}
        self._is_closed = False

    @property
    def has_work(self) -> bool:
        """True while a step can change anything."""
        return self.engine.has_work

    @property
    def live(self) -> tuple[ClientRequest, ...]:
        """Clients whose requests have not ended, by arrival."""
        return tuple(self._live.values())

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        tenant: str = "",
        streams: bool = False,
    ) -> ClientRequest:
        """Queue a request; all its completions or none.

        Args:
            prompt: Text or token ids.
            params: ``n`` may be above 1.
            request_id: Unique among live requests.
            priority: Smaller is more urgent, for policies that look at it.
            tenant: Who asks.
            streams: :meth:`step` reports every change, not only the end.

        Raises:
            RequestError: The request is at fault or was refused; nothing of it is left in the engine.
        """
        if self._is_closed:
            raise InvalidRequestError(f"request {request_id!r} came after the engine was closed.")
        if request_id in self._live:
            raise InvalidRequestError(f"request {request_id!r} is live already.", hint="Choose another request id.")
        text = prompt if isinstance(prompt, str) else None
        request = Request(
            request_id=request_id,
            prompt_token_ids=self.tokenizer.encode(prompt) if isinstance(prompt, str) else as_token_ids(prompt),
            params=params,
            priority=priority,
            tenant=tenant,
        )
        client = ClientRequest(request, prompt=text, tokenizer=self.tokenizer, streams=streams)
        self._live[request_id] = client
        try:
            for one, completion in zip(client.requests, client.completions, strict=True):
                self._processor.add(client, completion, slot=self.engine.add(one))
        except RequestError:
            self.abort(client)
            raise
        return client

    def abort(self, client: ClientRequest) -> None:
        """End a request at once; nothing happens if it has ended. What it has so far stays in its output."""
        for completion in client.completions:
            # Without a slot it never reached the engine, where its name may be another's.
            if completion.finish_reason is None and completion.slot >= 0:
                finished = self.engine.abort(completion.request_id)
                if finished is not None:
                    self._processor.finish(finished)
        self._forget(client)

    def find(self, request_id: str) -> ClientRequest | None:
        """Return a live request by the client's id. Pure."""
        return self._live.get(request_id)

    def step(self) -> list[ClientRequest]:
        """Run one step of the engine; returns the clients with news: streams that grew, and whoever is finished."""
        changed = self._processor.process(self.engine.step())
        for client in changed:
            if client.is_finished:
                self._forget(client)
        return changed

    def close(self) -> None:
        """End every request and close the engine; may be called twice."""
        self._is_closed = True
        for client in self.live:
            self.abort(client)
        self.engine.close()

    def _forget(self, client: ClientRequest) -> None:
        if self._live.get(client.request_id) is client:
            del self._live[client.request_id]
