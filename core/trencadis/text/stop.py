"""Stop strings, found across the borders of tokens and text deltas.

Each stop string is followed by its own Knuth-Morris-Pratt automaton: the state is the length of the longest suffix of the
text so far that begins the stop string. So a character costs O(1) amortised per stop string, whatever the strings are, and
the text to hold back is exactly the largest state.

Source: D. Knuth, J. Morris, V. Pratt, "Fast Pattern Matching in Strings", SIAM J. Comput. 6(2), 1977.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

__all__ = ["StopChecker"]


class StopChecker:
    """Passes text on until a stop string is complete; no part of that stop string gets out.

    The stop string that is complete first wins, wherever the borders of the deltas lie; of two that end at the same
    character, the longer one. Text that could begin a stop string is held back until it is decided.

    Args:
        stops: Strings that end the text, none of them empty.
        include: Pass the stop string itself on, too.

    Attributes:
        matched: The stop string that was found, or None.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self.matched: str | None = None
        self._stops = sorted(stops, key=len, reverse=True)
        self._borders = [_border_lengths(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._include = include
        self._held = ""

    def feed(self, delta: str) -> str:
        """Return the text that may be passed on now; nothing more after a match. O(characters x stop strings)."""
        if self.matched is not None:
            return ""
        text = self._held + delta
        for end in range(len(self._held), len(text)):
            stop = self._advance(text[end])
            if stop is not None:
                self.matched, self._held = stop, ""
                return text[: end + 1 if self._include else end + 1 - len(stop)]
        keep = len(text) - max(self._states, default=0)
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """Return what was held back, because no text will follow."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return held

    def _advance(self, character: str) -> str | None:
        """Move every automaton by one character; the first (longest) stop string that is complete, or None."""
        found = None
        for i, stop in enumerate(self._stops):
            state = self._states[i]
            while state and stop[state] != character:
                state = self._borders[i][state - 1]
            if stop[state] == character:
                state += 1
            self._states[i] = state
            if state == len(stop):
                found = found or stop
        return found


@functools.lru_cache(maxsize=256)  # the n completions of a prompt have the same stop strings, and so have many requests
def _border_lengths(text: str) -> tuple[int, ...]:
    """Return, for each prefix of ``text``, the length of its longest proper prefix that is also its suffix. Pure."""
    borders = [0] * len(text)
    length = 0
    for i in range(1, len(text)):
        while length and text[i] != text[length]:
            length = borders[length - 1]
        if text[i] == text[length]:
            length += 1
        borders[i] = length
    return tuple(borders)
