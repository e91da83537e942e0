"""Latencies of finished requests, and their summary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trencadis.records import FinishedSequence

__all__ = ["Latencies"]


class Latencies:
    """TTFT, TPOT and E2E of requests, and how many kept their targets.

    Args:
        ttft_target_s: Most seconds to the first token.
        tpot_target_s: Most seconds for each token after the first, on average.
    """

    def __init__(self, ttft_target_s: float, tpot_target_s: float) -> None:
        self._targets_s = ttft_target_s, tpot_target_s
        self._ttft_s: list[float] = []
        self._urgent_ttft_s: list[float] = []
        self._tpot_s: list[float] = []
        self._e2e_s: list[float] = []
        self._num_good = 0

    def add(self, end: FinishedSequence, *, arrival_s: float, urgent: bool = False) -> None:
        """Count a finished request; one that never yielded a token counts as late only.

        Args:
            end: Its sequence.
            arrival_s: When it came; the engine may have taken it in later.
            urgent: Whether its TTFT counts among the urgent ones too.
        """
        self._e2e_s.append(end.finish_s - arrival_s)
        if end.first_token_s is None:
            return
        ttft_s, num_after = end.first_token_s - arrival_s, len(end.token_ids) - 1
        tpot_s = (end.finish_s - end.first_token_s) / num_after if num_after else 0.0
        self._ttft_s.append(ttft_s)
        if urgent:
            self._urgent_ttft_s.append(ttft_s)
        if num_after:
            self._tpot_s.append(tpot_s)
        self._num_good += ttft_s <= self._targets_s[0] and tpot_s <= self._targets_s[1]

    def summary(self, duration_s: float) -> dict[str, Any]:
        """Return means, 99th percentiles and goodput, named as in ``ScheduleResult``; 0 where nothing was counted. Pure."""
        return {
            "num_requests": len(self._e2e_s),
            "ttft_mean_s": _mean(self._ttft_s),
            "ttft_p99_s": _p99(self._ttft_s),
            "urgent_ttft_p99_s": _p99(self._urgent_ttft_s),
            "tpot_mean_s": _mean(self._tpot_s),
            "tpot_p99_s": _p99(self._tpot_s),
            "e2e_mean_s": _mean(self._e2e_s),
            "e2e_p99_s": _p99(self._e2e_s),
            "goodput": self._num_good / duration_s if duration_s else 0.0,
        }


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0


def _p99(values: Sequence[float]) -> float:
    return float(np.percentile(values, 99)) if values else 0.0
