"""Small numbers that both sides call a request by, given again once they are back."""

from __future__ import annotations

import heapq

__all__ = ["Tickets"]


class Tickets:
    """Always gives the smallest free number, so that arrays over tickets stay small."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._num_made = 0

    @property
    def num_taken(self) -> int:
        """Tickets that are not back."""
        return self._num_made - len(self._free)

    def take(self) -> int:
        """Return a free ticket; O(log)."""
        if self._free:
            return heapq.heappop(self._free)
        self._num_made += 1
        return self._num_made - 1

    def give_back(self, ticket: int) -> None:
        """Take a ticket back; O(log)."""
        heapq.heappush(self._free, ticket)
