"""A line in the log every few seconds."""

from __future__ import annotations

import logging
import math

import attrs

from trencadis.interfaces import Observer
from trencadis.records import StepStats
from trencadis_plugins.observer.config import LogObserverConfig

__all__ = ["LogObserver"]

_log = logging.getLogger("trencadis.stats")


@attrs.define
class _Window:
    """Sums over the steps since the last line."""

    start_s: float
    idle_since_s: float | None = None
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_emitted_tokens: int = 0
    num_scheduled_tokens: int = 0
    num_padded_tokens: int = 0
    num_preemptions: int = 0
    num_drafted_sequences: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def add(self, stats: StepStats) -> None:
        self.num_steps += 1
        self.num_prompt_tokens += stats.num_prompt_tokens_admitted
        self.num_cached_tokens += stats.num_prompt_tokens_cached
        self.num_emitted_tokens += stats.num_emitted_tokens
        self.num_scheduled_tokens += stats.num_scheduled_tokens
        self.num_padded_tokens += stats.num_padded_tokens
        self.num_preemptions += stats.num_preempted
        self.num_drafted_sequences += stats.num_drafted_sequences
        self.num_draft_tokens += stats.num_draft_tokens
        self.num_accepted_tokens += stats.num_accepted_tokens


class LogObserver(Observer):
    """Writes one INFO line to the logger ``trencadis.stats``, at most every ``interval_s`` of the engine's clock.

    A line counts the steps since the line before; time without work is in none, and steps in which no token was computed make none.
    Where work ends the line is due if the last one is so long ago; else these steps are in the next. ``close`` writes what is left.

    Args:
        config: How often.
    """

    def __init__(self, config: LogObserverConfig | None = None) -> None:
        self._interval_s = (config if config is not None else LogObserverConfig()).interval_s
        self._window: _Window | None = None
        self._last: StepStats | None = None
        self._written_s = -math.inf

    def on_step(self, stats: StepStats) -> None:
        """Add the step, and write the line if it is due. A step with work starts the clock at its beginning."""
        has_work = bool(stats.num_running or stats.num_waiting)
        begin_s = stats.now_s - stats.plan_s - stats.device_s - stats.commit_s
        window = self._window
        if (window is None or window.idle_since_s is not None) and not has_work and not _has_tokens(stats):
            return
        if window is None:
            window = self._window = _Window(begin_s)
        elif window.idle_since_s is not None:
            window.start_s += max(0.0, begin_s - window.idle_since_s)
            window.idle_since_s = None
        window.add(stats)
        self._last = stats
        if not has_work and stats.now_s - self._written_s < self._interval_s:
            window.idle_since_s = stats.now_s
        elif not has_work:
            self.close()
        elif stats.now_s - window.start_s >= self._interval_s:
            self.close()
            self._window = _Window(stats.now_s)

    def close(self) -> None:
        """Write the line of the steps since the last one, if a token was computed in them."""
        if self._window is not None and self._last is not None and _has_tokens(self._window):
            self._write(self._last, self._window)
        self._window = self._last = None

    def _write(self, stats: StepStats, window: _Window) -> None:
        self._written_s = stats.now_s
        elapsed_s = stats.now_s - window.start_s
        num_blocks = stats.num_used_blocks + stats.num_cached_blocks + stats.num_free_blocks
        _log.info(
            "running %d, waiting %d | prompt %.1f tok/s, output %.1f tok/s | cache used %.1f %%, prefix hits %.1f %% | "
            "padding %.1f %% | preemptions %d | %ssteps %d in %.1f s",
            stats.num_running,
            stats.num_waiting,
            _ratio(window.num_prompt_tokens, elapsed_s),
            _ratio(window.num_emitted_tokens, elapsed_s),
            100 * _ratio(stats.num_used_blocks, num_blocks),
            100 * _ratio(window.num_cached_tokens, window.num_prompt_tokens),
            100 * _ratio(window.num_padded_tokens - window.num_scheduled_tokens, window.num_padded_tokens),
            window.num_preemptions,
            _drafts(window),
            window.num_steps,
            elapsed_s,
        )


def _has_tokens(counts: _Window | StepStats) -> bool:
    """Return whether a token was computed or put out. Pure."""
    return bool(counts.num_scheduled_tokens or counts.num_emitted_tokens)


def _drafts(window: _Window) -> str:
    """Return what became of drafts, empty if there were none. Pure."""
    if not window.num_drafted_sequences:
        return ""
    accepted = 100 * _ratio(window.num_accepted_tokens, window.num_draft_tokens)
    length = 1 + window.num_accepted_tokens / window.num_drafted_sequences
    return f"drafts {window.num_draft_tokens}, accepted {accepted:.1f} %, mean acceptance length {length:.2f} | "


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
