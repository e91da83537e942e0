"""Pending for what other threads and processes do, however slow the machine is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from support.kv.engine_pairs import Station

__all__ = ["PATIENCE_S", "eventually"]

PATIENCE_S = 60.0
_PAUSE_S = 0.002


def eventually(condition: Callable[[], bool], *, of: Iterable[Station] = (), within_s: float = PATIENCE_S) -> float:
    """Wait until something holds, with engines that are stepped meanwhile; returns for how long, seconds."""
    start_s = time.monotonic()
    while not condition():
        assert time.monotonic() - start_s < within_s, "it never happens"
        for station in of:
            if station.engine.has_work:
                station.step()
        threading.Event().wait(_PAUSE_S)
    return time.monotonic() - start_s
