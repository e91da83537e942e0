"""Requests that the KV connector brings: prefills of other engines, which run here like everybody's and whose output is nobody's.

take_requests ─▶ add ─▶ runs ─▶ on_request_token ─▶ ended ─▶ on_request_ended
take_withdrawn ─────────▶ abort ─▶┘
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import attrs
import msgspec
import numpy as np

from trencadis.engine.transfer.guarded_connector import GuardedConnector
from trencadis.errors import TrencadisError
from trencadis.records import BoolArray, FinishedSequence, FirstToken, Request, TokenDeltas

__all__ = ["Guests"]

logger = logging.getLogger("trencadis.engine")


class Guests:
    """The connector's own requests in one engine.

    Args:
        connector: The scheduler side, or None: then everything here is a no-op.
        add: Adds a request to the engine; returns its slot.
        abort: Ends one, whatever its state.
        backlog: Returns how many tokens wait to be computed, those of others included.
    """

    def __init__(
        self,
        connector: GuardedConnector | None,
        *,
        add: Callable[[Request], int],
        abort: Callable[[str], FinishedSequence | None],
        backlog: Callable[[], int],
    ) -> None:
        self._connector = connector
        self._add = add
        self._abort = abort
        self._backlog = backlog
        self._num_told = 0
        self._slot_of: dict[str, int] = {}
        self._silent: dict[int, str] = {}  # by slot: those that have no token yet

    @property
    def are_waiting(self) -> bool:
        """True if :meth:`let_in` would do something."""
        return self._connector is not None and self._connector.has_requests

    def wake_by(self, wake: Callable[[], None]) -> None:
        """Let the connector wake an engine that rests."""
        if self._connector is not None:
            self._connector.on_waker(wake)

    def let_in(self) -> None:
        """Add the requests that came, and end those that are not wanted any more; before each step."""
        if self._connector is None:
            return
        if self._connector.has_requests:
            self._let_in(self._connector)
        self._tell_backlog(self._connector)

    def without(self, deltas: TokenDeltas) -> TokenDeltas:
        """Return what is left for clients, and tell the connector which of its requests have ended."""
        if self._connector is None:
            return deltas
        self._tell_backlog(self._connector)
        if not self._slot_of:
            return deltas
        is_guest = np.isin(deltas.slots, np.fromiter(self._slot_of.values(), np.int32))
        if self._silent and is_guest.any():
            self._tell_tokens(deltas, is_guest, self._connector)
        others: list[FinishedSequence] = []
        for finished in deltas.finished:
            if self._slot_of.pop(finished.request_id, None) is None:
                others.append(finished)
            else:
                self._silent.pop(finished.slot, None)
                self._ended(finished, self._connector)
        if len(others) != len(deltas.finished):
            deltas = attrs.evolve(deltas, finished=tuple(others))
        return _keep(deltas, ~is_guest) if is_guest.any() else deltas

    def _let_in(self, connector: GuardedConnector) -> None:
        for request in connector.take_requests():
            self._admit(request, connector)
        for request_id in connector.take_withdrawn():
            if request_id in self._slot_of and self._abort(request_id) is not None:
                self._silent.pop(self._slot_of.pop(request_id), None)
                connector.on_request_ended(request_id, transfer_params=None, error="it was withdrawn")

    def _admit(self, request: Request, connector: GuardedConnector) -> None:
        try:
            slot = self._slot_of[request.request_id] = self._add(request)
            self._silent[slot] = request.request_id
        except TrencadisError as error:
            logger.debug("A request of the KV connector was refused: %s", error)
            connector.on_request_ended(request.request_id, transfer_params=None, error=str(error))

    def _tell_tokens(self, deltas: TokenDeltas, is_guest: BoolArray, connector: GuardedConnector) -> None:
        """Tell the connector the first token of each of its requests."""
        firsts = np.cumsum(deltas.num_tokens) - deltas.num_tokens
        for i in np.flatnonzero(is_guest).tolist():
            request_id = self._silent.pop(int(deltas.slots[i]), None)
            if request_id is not None:
                entry = next((entry for entry in deltas.logprobs if entry.index == i), None)
                first = FirstToken(token_id=int(deltas.token_ids[firsts[i]]), logprobs=entry)
                connector.on_request_token(request_id, first)

    def _tell_backlog(self, connector: GuardedConnector) -> None:
        """Say how much there is to do; an engine where others' prompts wait behind its own is not the one to send more to."""
        num_tokens = self._backlog()
        if num_tokens != self._num_told:
            self._num_told = num_tokens
            connector.on_backlog(num_tokens)

    def _ended(self, finished: FinishedSequence, connector: GuardedConnector) -> None:
        params = finished.transfer_params
        error = "" if params is not None else finished.error or "it ended without KV to hand over"
        connector.on_request_ended(finished.request_id, transfer_params=params, error=error)


def _keep(deltas: TokenDeltas, is_kept: BoolArray) -> TokenDeltas:
    """Return the deltas of some sequences. Pure."""
    index = np.cumsum(is_kept) - 1
    return attrs.evolve(
        deltas,
        slots=deltas.slots[is_kept],
        num_tokens=deltas.num_tokens[is_kept],
        token_ids=deltas.token_ids[np.repeat(is_kept, deltas.num_tokens)],
        logprobs=tuple(
            msgspec.structs.replace(entry, index=int(index[entry.index]))
            for entry in deltas.logprobs
            if is_kept[entry.index]
        ),
    )
