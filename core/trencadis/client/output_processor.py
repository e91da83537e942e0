"""New tokens of a step to the clients they belong to.

Per step this touches only sequences whose client streams or has stop strings; the others cost next to nothing until they end.
"""

from __future__ import annotations

from collections.abc import Callable

from trencadis.client.client_request import ClientRequest
from trencadis.client.completion import Completion
from trencadis.client.news import StepNews
from trencadis.errors import RequestError
from trencadis.records import FinishedSequence

__all__ = ["OutputProcessor"]


class OutputProcessor:
    """Keeps which completion has which slot. Engine thread.

    Args:
        stop: Ends a sequence in the engine by its request id, because its text is complete; None if it has ended already.
    """

    def __init__(self, stop: Callable[[str], FinishedSequence | None]) -> None:
        self._stop = stop
        self._by_slot: dict[int, tuple[ClientRequest, Completion]] = {}
        self._watched: dict[int, tuple[ClientRequest, Completion]] = {}
        self._by_id: dict[str, tuple[ClientRequest, Completion]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, client: ClientRequest, completion: Completion, *, slot: int) -> None:
        """Expect tokens for a completion in a slot."""
        completion.slot = slot
        entry = (client, completion)
        self._by_slot[slot] = self._by_id[completion.request_id] = entry
        if completion.is_watched:
            self._watched[slot] = entry
        else:
            self._watched.pop(slot, None)

    def process(self, news: StepNews) -> list[ClientRequest]:
        """Take a step's tokens; returns the clients that have news: streams that grew, and whoever is finished."""
        changed: list[ClientRequest] = []
        if news.logprobs or news.prompt_logprobs:
            self._take_logprobs(news)
        if self._watched:
            self._append(news, changed)
        for finished in news.finished:
            owner = self.finish(finished)
            if owner is not None and (owner.streams or owner.is_finished) and not owner.is_changed:
                owner.is_changed = True
                changed.append(owner)
        for client in changed:
            client.num_changes += 1
            client.is_changed = False
        return changed

    def _append(self, news: StepNews, changed: list[ClientRequest]) -> None:
        """Give watched completions their tokens, and note whose clients want to know."""
        ended = {finished.request_id: finished for finished in news.finished} if news.finished else None
        token_ids, watched = news.token_ids, self._watched
        end = 0
        for slot, num_tokens in zip(news.slots, news.num_tokens, strict=True):
            start, end = end, end + num_tokens
            entry = watched.get(slot)
            if entry is None:
                continue
            client, completion = entry
            finished = ended.get(completion.request_id) if ended else None
            by_token = finished is not None and finished.stop_token_id is not None
            is_complete = completion.append(token_ids[start:end], by_token)
            if is_complete and finished is None:
                stopped = self._stop(completion.request_id)
                if stopped is not None:
                    self.finish(stopped)
            if (client.streams or client.is_finished) and not client.is_changed:
                client.is_changed = True
                changed.append(client)

    def finish(self, finished: FinishedSequence) -> ClientRequest | None:
        """Take the end of a sequence; returns whose it was, or None if nobody waits for it."""
        client, completion = self._forget(finished.request_id)
        if client is None or completion is None:
            return None
        client.finish(completion, finished)
        return client

    def refuse(self, request_id: str, error: RequestError) -> ClientRequest | None:
        """Learn that the engine did not take a request after all; returns whose it was, or None if nobody waits for it."""
        client, completion = self._forget(request_id)
        if client is None or completion is None:
            return None
        client.refusal = client.refusal or error
        client.fail(completion, str(error))
        return client

    def _forget(self, request_id: str) -> tuple[ClientRequest, Completion] | tuple[None, None]:
        client, completion = self._by_id.pop(request_id, (None, None))
        if client is None or completion is None:
            return None, None
        # The slot may have been given to another sequence since.
        if self._by_slot.get(completion.slot, (None, None))[1] is completion:
            del self._by_slot[completion.slot]
            self._watched.pop(completion.slot, None)
        return client, completion

    def _take_logprobs(self, news: StepNews) -> None:
        for entry in news.logprobs:
            _, completion = self._by_slot.get(news.slots[entry.index], (None, None))
            if completion is not None:
                completion.add_logprobs(entry)
        for entry in news.prompt_logprobs:
            client, _ = self._by_slot.get(entry.index, (None, None))
            if client is not None:
                client.add_prompt_logprobs(entry)
