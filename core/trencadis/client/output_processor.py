"""Output processor: gives the tokens of a step to the completions they belong to.

A step touches only sequences whose client streams or has stop strings; the others are processed when they end.
"""

from __future__ import annotations

from collections.abc import Callable

from trencadis.client.client_request import ClientRequest
from trencadis.client.completion import Completion
from trencadis.client.engine_client import StepOutputs
from trencadis.errors import RequestError
from trencadis.records import FinishedSequence

__all__ = ["OutputProcessor"]


class OutputProcessor:
    """Maps slots and request ids to completions. Used by the thread that steps the engine.

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
        """Register a completion for the tokens of a slot."""
        completion.slot = slot
        entry = (client, completion)
        self._by_slot[slot] = self._by_id[completion.request_id] = entry
        if completion.is_watched:
            self._watched[slot] = entry
        else:
            self._watched.pop(slot, None)

    def process(self, outputs: StepOutputs) -> list[ClientRequest]:
        """Process the outputs of a step; returns the changed clients: streams that grew, and requests that finished."""
        changed: list[ClientRequest] = []
        if outputs.logprobs or outputs.prompt_logprobs:
            self._add_logprobs(outputs)
        if self._watched:
            self._append(outputs, changed)
        for finished in outputs.finished:
            owner = self.finish(finished)
            if owner is not None and (owner.streams or owner.is_finished) and not owner.is_changed:
                owner.is_changed = True
                changed.append(owner)
        for client in changed:
            client.num_changes += 1
            client.is_changed = False
        return changed

    def _append(self, outputs: StepOutputs, changed: list[ClientRequest]) -> None:
        """Append tokens to watched completions, and collect the clients to report."""
        ended = {finished.request_id: finished for finished in outputs.finished} if outputs.finished else None
        token_ids, watched = outputs.token_ids, self._watched
        end = 0
        for slot, num_tokens in zip(outputs.slots, outputs.num_tokens, strict=True):
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
        """Finish the completion of a sequence; returns its client, or None if there is none."""
        client, completion = self._forget(finished.request_id)
        if client is None or completion is None:
            return None
        client.finish(completion, finished)
        return client

    def refuse(self, request_id: str, error: RequestError) -> ClientRequest | None:
        """Fail the completion of a request that the engine refused; returns its client, or None if there is none."""
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

    def _add_logprobs(self, outputs: StepOutputs) -> None:
        for entry in outputs.logprobs:
            _, completion = self._by_slot.get(outputs.slots[entry.index], (None, None))
            if completion is not None:
                completion.add_logprobs(entry)
        for entry in outputs.prompt_logprobs:
            client, _ = self._by_slot.get(entry.index, (None, None))
            if client is not None:
                client.add_prompt_logprobs(entry)
