"""Starting up: what took how long, and garbage collection that does not get in the way."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator, Mapping
from typing import Final

from trencadis.clock import Clock

__all__ = ["Phases", "in_words", "rare_collections"]

RARELY: Final = 50_000
"""Objects made, less those freed, between collections of the young: by default 700."""

_lock = threading.Lock()
_before: list[tuple[int, int, int]] = []
"""The thresholds as each of the contexts that are open now found them."""


class Phases:
    """One phase after the other, without gaps: what they took is what the whole took.

    Args:
        clock: Measures.
        first: The phase that begins now.

    Attributes:
        took_s: Seconds by name, in order of their beginnings; a name that comes again goes on counting.
    """

    def __init__(self, clock: Clock, first: str) -> None:
        self._clock = clock
        self._name = first
        self._since_s = clock.now_s()
        self.took_s: dict[str, float] = {first: 0.0}

    def begin(self, name: str) -> None:
        """End the phase and begin another one."""
        now_s = self._clock.now_s()
        self.took_s[self._name] += now_s - self._since_s
        self.took_s.setdefault(name, 0.0)
        self._name, self._since_s = name, now_s

    def end(self) -> str:
        """Return the whole and its phases in words; what comes later is not counted: ``1.5 s: weights 1.0 s, check 0.5 s``."""
        self.begin(self._name)
        return in_words(self.took_s)


def in_words(took_s: Mapping[str, float]) -> str:
    """Return a sum and what it is made of. Pure.

    Args:
        took_s: Seconds by name.
    """
    return f"{sum(took_s.values()):.1f} s: {', '.join(f'{name} {one_s:.1f} s' for name, one_s in took_s.items())}"


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Collect garbage rarely while a process loads, and as before afterwards; contexts may overlap in several threads.

    Loading makes hundreds of thousands of objects that stay, and each collection looks for garbage among them in vain: a sixth of the
    time that it takes to import torch and transformers.
    """
    with _lock:
        young, middle, old = gc.get_threshold()
        _before.append((young, middle, old))
        if young:  # 0: somebody has switched collections off
            gc.set_threshold(max(young, RARELY), middle, old)
    try:
        yield
    finally:
        with _lock:
            if len(_before) == 1:
                gc.set_threshold(*_before[0])
                _before.clear()
            else:
                _before.pop()
