"""The outputs of one request as an iterator, for a caller that steps the engine itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from trencadis.client.client_request import ClientRequest
from trencadis.records import RequestOutput

__all__ = ["ClientStream"]


class ClientStream(Iterator[RequestOutput]):
    """Outputs of one request, as often as there is news; steps the engine until there is some.

    Args:
        client: The request, queued.
        step: Takes a step of the engine.
        abort: Ends a request.
        abandoned: Gets the request if nobody reads it any more; whoever steps the engine ends what is in there first.
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
        while not self._has_news():
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

    def _has_news(self) -> bool:
        return self._client.is_finished or self._client.num_changes > self._num_seen
