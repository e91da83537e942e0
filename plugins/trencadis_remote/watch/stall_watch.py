"""Stall watch: detects from outside that a worker process makes no progress, logs where it is stuck, and kills it in the end.

    every second   ActivityView.read ─ the beat has changed ──────────────▶ it makes progress
                                     └ not for watchdog_s / 2 ─────────────▶ stalled: logged, with the stacks of all its threads; its flight record is written
                                     └ not for watchdog_s ─────────────────▶ killed
                                     └ a signal has stopped it for 5 s ────▶ killed
                                     └ its ranks start again for 5 s ──────▶ stalled, until they have

Progress is what counts, never how soon something is answered: an engine that is saturated, loads or compiles is well. An idle one
beats, so that it is known to live without being asked. A watchdog within the process would not run while C code holds Python's lock.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from trencadis.activity import ActivityReading, ActivityView, EnginePhase
from trencadis.clock import Clock, SystemClock
from trencadis.processes import DUMP_SIGNAL, ChildProcess, is_stopped, process_state
from trencadis_remote.watch.record_signal import RECORD_SIGNAL

__all__ = ["StallWatch", "beat_s"]

logger = logging.getLogger("trencadis")

_IDLE_LIMIT_S: Final = 15.0
"""Longest silence of an idle engine, which beats every second."""
_STOPPED_S: Final = 2.5
"""A process that SIGSTOP has stopped is stalled after this time."""
_RESTARTING_S: Final = 5.0
"""After so long a restart of ranks is told to those who would send requests."""
_SLOW_STEPS: Final = 20.0
"""A step may take this many times as long as the slow ones before it: some batches are larger than all before."""
_MAX_GAP: Final = 2.0
"""Looks apart by more intervals count as this many: then it was this process that was stopped, or had no processor."""


def beat_s(watchdog_s: float) -> float:
    """Return how often an idle engine gives a sign of progress, seconds. Pure.

    Args:
        watchdog_s: ``[engine] watchdog_s``.
    """
    return min(1.0, watchdog_s / 10)


class StallWatch:
    """Watches one process on a thread of its own, from :meth:`start` until :meth:`close` or the end of the process.

    Args:
        process: The engine's.
        view: View of the engine's work.
        watchdog_s: Without progress for longer it is killed, after half of it it counts as stalled; seconds.
        clock: Measures time between looks.
        kill: Ends the process and all that it started.

    Attributes:
        stalled: Words for a stall, such as ``stalled: step 8123 for 31 s in backend.forward``; empty while all is well. May be read
            from any thread.
        verdict: Why the process was killed, a sentence whose subject is left out; empty if it was not.
    """

    def __init__(
        self,
        process: ChildProcess,
        view: ActivityView,
        *,
        watchdog_s: float,
        clock: Clock | None = None,
        kill: Callable[[], object],
    ) -> None:
        self.stalled = ""
        self.verdict = ""
        self._process = process
        self._view = view
        self._watchdog_s = watchdog_s
        self._clock = clock or SystemClock()
        self._kill = kill
        self._interval_s = beat_s(watchdog_s)
        self._beat = -1
        self._age_s = 0.0
        self._looked_s = self._clock.now_s()
        self._closed = threading.Event()

    def start(self) -> None:
        """Begin to look, on a thread that keeps no program alive."""
        threading.Thread(target=self._main, name="trencadis-watch", daemon=True).start()

    def close(self) -> None:
        """Look no more; may be called twice, and from any thread."""
        self._closed.set()

    def look(self) -> None:
        """Compare what the engine does with what it did at the last look, and act on it."""
        if self.verdict:
            return
        now_s = self._clock.now_s()
        gap_s = min(now_s - self._looked_s, _MAX_GAP * self._interval_s)
        self._looked_s = now_s
        reading = self._view.read()
        halted = is_stopped(self._process.pid)
        if reading.phase is EnginePhase.RESTARTING and not halted:
            self._age_s += gap_s
            if self._age_s >= _RESTARTING_S:
                self.stalled = f"starting its ranks again, for {self._age_s:.0f} s now"
            return
        if reading.beat != self._beat or (reading.phase.has_no_limit and not halted):
            self._beat = reading.beat
            if self.stalled:
                logger.warning("The engine goes on: it had made no progress for %.0f s.", self._age_s)
            self.stalled, self._age_s = "", 0.0
            return
        self._age_s += gap_s
        limit_s = self._limit_s(reading, is_stopped=halted)
        if self._age_s < limit_s:
            return
        is_new, self.stalled = not self.stalled, f"stalled: {_where(reading, self._age_s)}"
        if self._age_s >= 2 * limit_s:
            self._end(reading)
        elif is_new:
            self._show(limit_s)

    def _limit_s(self, reading: ActivityReading, *, is_stopped: bool) -> float:
        """Return after how long without progress an engine is stalled."""
        limit_s = self._watchdog_s / 2
        if is_stopped:
            return min(limit_s, _STOPPED_S)
        if reading.phase is EnginePhase.IDLE:
            return min(limit_s, _IDLE_LIMIT_S)
        return max(limit_s, _SLOW_STEPS * reading.slow_step_s)

    def _show(self, limit_s: float) -> None:
        """Log where the engine is stuck; what the process writes itself follows, if it can."""
        logger.error(
            "The engine is %s; it is killed after %.0f s. Its process %d is in state %s, waiting in %s; its stacks follow unless it is "
            "stopped.",
            self.stalled,
            2 * limit_s,
            self._process.pid,
            process_state(self._process.pid, "State") or "unknown",
            _waits_in(self._process.pid) or "unknown",
        )
        if DUMP_SIGNAL is not None:
            self._process.send_signal(DUMP_SIGNAL)
        if RECORD_SIGNAL is not None:
            self._process.send_signal(RECORD_SIGNAL)

    def _end(self, reading: ActivityReading) -> None:
        self.verdict = f"hung: no progress in {_where(reading, self._age_s)} ([engine] watchdog_s = {self._watchdog_s:g}); it was killed"
        self._kill()
        self.close()

    def _main(self) -> None:
        while not self._closed.wait(self._interval_s) and self._process.poll() is None:
            self.look()


def _where(reading: ActivityReading, age_s: float) -> str:
    """Return what an engine is busy with: ``step 8123 for 31 s in backend.forward while X was being called``. Pure."""
    return f"step {reading.step} for {age_s:.3g} s in {reading.phase.text}{reading.called}"


def _waits_in(pid: int) -> str:
    """Return the function of the kernel that a process waits in; empty where it is not known."""
    try:
        return Path(f"/proc/{pid}/wchan").read_text().strip()
    except OSError:
        return ""
