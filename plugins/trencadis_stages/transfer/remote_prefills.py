"""Runs prefill requests received from other engines; their output is not returned to clients.

wake-up ─▶ take_requests ─▶ add ─▶ runs ─▶ on_request_token ─▶ ended ─▶ on_request_ended
         └ take_withdrawn ─▶ abort ────────────────────────────────────▶┘
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import attrs
import msgspec
import numpy as np

from trencadis.errors import TrencadisError
from trencadis.interfaces import SupportsRemotePrefill
from trencadis.records import BoolArray, FinishedSequence, FirstToken, Request, TokenDeltas

__all__ = ["RemotePrefills"]

logger = logging.getLogger("trencadis.engine")


class RemotePrefills:
    """Requests of other engines in this one; exists only if the KV connector supports remote prefills.

    Args:
        connector: The scheduler side.
        add: Adds a request to the engine; returns its slot.
        abort: Ends one in any state.
        backlog: Returns the number of queued tokens, of all requests.
        wake: Called, from any thread, when the engine has work again.
    """

    def __init__(
        self,
        connector: SupportsRemotePrefill,
        *,
        add: Callable[[Request], int],
        abort: Callable[[str], FinishedSequence | None],
        backlog: Callable[[], int],
        wake: Callable[[], None],
    ) -> None:
        self._connector = connector
        self._add = add
        self._abort = abort
        self._backlog = backlog
        self._last_backlog = 0
        self._slot_of: dict[str, int] = {}
        self._without_token: dict[int, str] = {}  # request id by slot
        self._is_woken = False
        self._wake = wake
        connector.on_waker(self._woken)

    @property
    def are_waiting(self) -> bool:
        """True if :meth:`admit` would add or end a request."""
        return self._is_woken

    def admit(self) -> None:
        """Add new remote prefills and abort withdrawn ones; before each step."""
        if self._is_woken:
            self._is_woken = False  # first: what comes from now on wakes again
            self._admit_new()
        self._report_backlog()

    def without(self, deltas: TokenDeltas) -> TokenDeltas:
        """Return the deltas of clients' requests; those of remote prefills go to the connector."""
        self._report_backlog()
        if not self._slot_of:
            return deltas
        is_remote = np.isin(deltas.slots, np.fromiter(self._slot_of.values(), np.int32))
        if self._without_token and is_remote.any():
            self._pass_tokens(deltas, is_remote)
        others: list[FinishedSequence] = []
        for finished in deltas.finished:
            if self._slot_of.pop(finished.request_id, None) is None:
                others.append(finished)
            else:
                self._without_token.pop(finished.slot, None)
                self._ended(finished)
        if len(others) != len(deltas.finished):
            deltas = attrs.evolve(deltas, finished=tuple(others))
        return _keep(deltas, ~is_remote) if is_remote.any() else deltas

    def _woken(self) -> None:
        self._is_woken = True
        self._wake()

    def _admit_new(self) -> None:
        for request in self._connector.take_requests():
            try:
                slot = self._slot_of[request.request_id] = self._add(request)
                self._without_token[slot] = request.request_id
            except TrencadisError as error:
                logger.debug("A request of the KV connector was refused: %s", error)
                self._connector.on_request_ended(request.request_id, transfer_params=None, error=str(error))
        for request_id in self._connector.take_withdrawn():
            if request_id in self._slot_of and self._abort(request_id) is not None:
                self._without_token.pop(self._slot_of.pop(request_id), None)
                self._connector.on_request_ended(request_id, transfer_params=None, error="it was withdrawn")

    def _pass_tokens(self, deltas: TokenDeltas, is_remote: BoolArray) -> None:
        """Forward the first token of each remote prefill."""
        firsts = np.cumsum(deltas.num_tokens) - deltas.num_tokens
        for i in np.flatnonzero(is_remote).tolist():
            request_id = self._without_token.pop(int(deltas.slots[i]), None)
            if request_id is not None:
                entry = next((entry for entry in deltas.logprobs if entry.index == i), None)
                first = FirstToken(token_id=int(deltas.token_ids[firsts[i]]), logprobs=entry)
                self._connector.on_request_token(request_id, first)

    def _report_backlog(self) -> None:
        """Report the number of queued tokens, by which other engines balance their load."""
        num_tokens = self._backlog()
        if num_tokens != self._last_backlog:
            self._last_backlog = num_tokens
            self._connector.on_backlog(num_tokens)

    def _ended(self, finished: FinishedSequence) -> None:
        params = finished.transfer_params
        error = "" if params is not None else finished.error or "it ended without KV to hand over"
        self._connector.on_request_ended(finished.request_id, transfer_params=params, error=error)


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
