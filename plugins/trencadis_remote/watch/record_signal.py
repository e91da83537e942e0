"""Signal handler that writes the flight record of an engine's process, even while the engine hangs.

    SIGUSR2 ─▶ Python's C handler ─▶ pipe ─▶ a thread of its own: Engine.dumps

Only C code that holds Python's lock keeps the thread from running; what the engine's thread waits for does not.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from trencadis.activity import ACTIVITY

__all__ = ["RECORD_SIGNAL", "ignore_record_signal", "record_at_signal"]

RECORD_SIGNAL: Final[signal.Signals | None] = getattr(signal, "SIGUSR2", None)
"""Has an engine's process write its flight record."""

_LOOK_S: Final = 1.5
"""An idle engine gives a sign of progress every second, one that computes several with each step."""


def ignore_record_signal() -> None:
    """Do nothing at the signal, which would otherwise end the process; called before there is an engine."""
    if RECORD_SIGNAL is not None:
        signal.signal(RECORD_SIGNAL, signal.SIG_IGN)


def record_at_signal(dumps: Sequence[Callable[[str, str], object]]) -> None:
    """Write a record at each signal from now on. Called on the main thread.

    Args:
        dumps: Functions that write a record, given a reason and a cause.
    """
    if RECORD_SIGNAL is None:
        return
    source, sink = os.pipe()
    os.set_blocking(sink, False)
    signal.set_wakeup_fd(sink, warn_on_full_buffer=False)
    signal.signal(RECORD_SIGNAL, lambda *_: None)
    threading.Thread(
        target=_serve, args=(source, RECORD_SIGNAL, dumps), name="trencadis-flight-record", daemon=True
    ).start()


def _serve(source: int, asked: signal.Signals, dumps: Sequence[Callable[[str, str], object]]) -> None:
    while numbers := os.read(source, 64):
        if asked in numbers:
            beat = ACTIVITY.num_beats
            time.sleep(_LOOK_S)
            hangs = beat == ACTIVITY.num_beats
            for dump in dumps:
                dump("stall" if hangs else "signal", f"signal {asked.name}")
