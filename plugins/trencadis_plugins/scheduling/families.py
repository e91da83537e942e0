"""Requests whose prompts begin alike."""

from __future__ import annotations

from trencadis.records import FloatArray, Int32Array, Request
from trencadis_plugins.scheduling.columns import SlotColumn

__all__ = ["Families"]

_Key = tuple[str, str, tuple[int, ...]]


class Families:
    """Gives live requests with the same first tokens, cache salt and adapter one number.

    Args:
        num_tokens: First tokens that are compared; shorter prompts are of no family. 0: nobody is.
    """

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._members: dict[_Key, list[int]] = {}  # number of the family, number of its members
        self._key_of: dict[int, _Key] = {}  # by slot
        self._column = SlotColumn()
        self._last = 0

    def __len__(self) -> int:
        return len(self._members)

    def add(self, slot: int, request: Request) -> None:
        """Put a request to its family."""
        prompt = request.prompt_token_ids
        if not self._num_tokens or len(prompt) <= self._num_tokens:
            return
        key = (request.cache_salt, request.adapter, prompt[: self._num_tokens])
        if key not in self._members:
            self._last += 1
            self._members[key] = [self._last, 0]
        self._members[key][1] += 1
        self._key_of[slot] = key
        self._column[slot] = self._members[key][0]

    def remove(self, slot: int) -> None:
        """Forget a request, and its family with its last member."""
        key = self._key_of.pop(slot, None)
        self._column[slot] = 0
        if key is not None:
            self._members[key][1] -= 1
            if not self._members[key][1]:
                del self._members[key]

    def of(self, slots: Int32Array) -> FloatArray:
        """Return the family of each slot, 1 or more, never used again; 0 for none."""
        return self._column.of(slots)
