"""Per-sequence state of a speculator, dropped when it is outdated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from trencadis.records import Request

__all__ = ["BySequence"]

State = TypeVar("State")


class BySequence(Generic[State]):
    """One state for each sequence, found by its slot.

    A slot may be given to another sequence, which is of another request. A sequence that was preempted is of the same request and has
    lost no token, so its state still holds.

    Args:
        make: Returns the state of a sequence that nothing is known of yet.
    """

    def __init__(self, make: Callable[[Request], State]) -> None:
        self._make = make
        self._kept: dict[int, tuple[Request, State]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, slot: int, request: Request) -> State:
        """Return the state of the sequence that holds a slot, a new one if the slot was another's."""
        kept = self._kept.get(slot)
        if kept is not None and kept[0] is request:
            return kept[1]
        return self.renew(slot, request)

    def known(self, slot: int) -> State | None:
        """Return the state of a slot, None if there is none."""
        kept = self._kept.get(slot)
        return None if kept is None else kept[1]

    def renew(self, slot: int, request: Request) -> State:
        """Return a new state for a sequence, if its tokens are not those the old one was made of."""
        state = self._make(request)
        self._kept[slot] = request, state
        return state

    def drop(self, slot: int) -> State | None:
        """Forget a slot and return its state, None if there was none."""
        kept = self._kept.pop(slot, None)
        return None if kept is None else kept[1]

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()
