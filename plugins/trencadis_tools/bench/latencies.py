"""Latencies of finished requests, and their summary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trencadis_tools.simulation.run import RequestRecord

__all__ = ["Latencies"]


class Latencies:
    """TTFT, TPOT and E2E of requests, and how many kept their targets."""

    def __init__(self) -> None:
        self._ttft_s: list[float] = []
        self._urgent_ttft_s: list[float] = []
        self._tpot_s: list[float] = []
        self._e2e_s: list[float] = []
        self._num_good = 0

    def add(self, record: RequestRecord) -> None:
        """Count a finished request; without a token it only counts as late. Requests of priority 0 are urgent."""
        self._e2e_s.append(record.e2e_s)
        if not record.num_output_tokens:
            return
        asked = record.request
        self._ttft_s.append(record.ttft_s)
        if not asked.priority:
            self._urgent_ttft_s.append(record.ttft_s)
        is_paced = record.num_output_tokens < 2 or record.tpot_s <= asked.tpot_target_s
        if record.num_output_tokens > 1:
            self._tpot_s.append(record.tpot_s)
        self._num_good += record.ttft_s <= asked.ttft_target_s and is_paced

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
