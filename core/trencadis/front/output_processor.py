"""New tokens of a step to the clients they belong to.

Per step this touches only sequences whose client streams, has stop strings or asked for log-probabilities; the others are found
by one array operation and cost nothing until they end.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from trencadis.errors import RequestError
from trencadis.front.client_request import ClientRequest
from trencadis.front.completion import Completion
from trencadis.records import FinishedSequence, TokenDeltas

__all__ = ["OutputProcessor"]


class OutputProcessor:
    """Keeps which completion has which slot. Engine thread.

    Args:
        stop: Ends a sequence in the engine by its request id, because its text is complete; None if it has ended already.
    """

    def __init__(self, stop: Callable[[str], FinishedSequence | None]) -> None:
        self._stop = stop
        self._by_slot: dict[int, tuple[ClientRequest, Completion]] = {}
        self._by_id: dict[str, tuple[ClientRequest, Completion]] = {}
        self._is_watched = np.zeros(256, np.bool_)

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, client: ClientRequest, completion: Completion, *, slot: int) -> None:
        """Expect tokens for a completion in a slot."""
        completion.slot = slot
        entry = (client, completion)
        self._by_slot[slot] = self._by_id[completion.request_id] = entry
        while slot >= len(self._is_watched):
            self._is_watched = np.concatenate([self._is_watched, np.zeros_like(self._is_watched)])
        self._is_watched[slot] = completion.is_watched

    def process(self, deltas: TokenDeltas) -> list[ClientRequest]:
        """Take a step's tokens; returns the clients that have news: streams that grew, and whoever is finished."""
        changed: dict[ClientRequest, None] = {}
        self._take_logprobs(deltas)
        ended = {finished.request_id: finished for finished in deltas.finished}
        # Plain lists: one by one, the elements of arrays cost more than all of them at once.
        slots, tokens = deltas.slots.tolist(), deltas.token_ids.tolist()
        counts, ends = deltas.num_tokens.tolist(), np.cumsum(deltas.num_tokens).tolist()
        for position in np.flatnonzero(self._is_watched[deltas.slots]).tolist():
            client, completion = self._by_slot[slots[position]]
            finished = ended.get(completion.request_id) if ended else None
            by_token = finished is not None and finished.stop_token_id is not None
            new = tokens[ends[position] - counts[position] : ends[position]]
            is_complete = completion.append(new, ends_with_stop_token=by_token)
            if is_complete and finished is None:
                stopped = self._stop(completion.request_id)
                if stopped is not None:
                    self.finish(stopped)
            if client.streams or client.is_finished:
                changed[client] = None
        for finished in deltas.finished:
            owner = self.finish(finished)
            if owner is not None and (owner.streams or owner.is_finished):
                changed[owner] = None
        for client in changed:
            client.num_changes += 1
        return list(changed)

    def finish(self, finished: FinishedSequence) -> ClientRequest | None:
        """Take the end of a sequence; returns whose it was, or None if nobody waits for it."""
        client, completion = self._forget(finished.request_id)
        if client is None or completion is None:
            return None
        completion.finish(finished)
        return client

    def refuse(self, request_id: str, error: RequestError) -> ClientRequest | None:
        """Learn that the engine did not take a request after all; returns whose it was, or None if nobody waits for it."""
        client, completion = self._forget(request_id)
        if client is None or completion is None:
            return None
        client.refusal = client.refusal or error
        completion.fail(str(error))
        return client

    def _forget(self, request_id: str) -> tuple[ClientRequest, Completion] | tuple[None, None]:
        client, completion = self._by_id.pop(request_id, (None, None))
        if client is None or completion is None:
            return None, None
        # The slot may have been given to another sequence since.
        if self._by_slot.get(completion.slot, (None, None))[1] is completion:
            del self._by_slot[completion.slot]
            self._is_watched[completion.slot] = False
        return client, completion

    def _take_logprobs(self, deltas: TokenDeltas) -> None:
        for entry in deltas.logprobs:
            _, completion = self._by_slot.get(int(deltas.slots[entry.index]), (None, None))
            if completion is not None:
                completion.add_logprobs(entry)
        for entry in deltas.prompt_logprobs:
            client, _ = self._by_slot.get(entry.index, (None, None))
            if client is not None:
                client.add_prompt_logprobs(entry)
