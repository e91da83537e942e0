"""Which buckets become graphs when the memory for graphs is bounded.

Prefill and decode graphs have a budget each. Buckets are tried in an order that a strategy names; one whose estimated memory does
not fit is left to run without a graph. What one phase does not use, a second round gives to the other.

Source: vllm-fork v0.5.3.post1-Gaudi-1.17.0, vllm/worker/habana_model_runner.py, with its second round for decodes mended (there it
can never run).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import attrs

from trencadis.records import Bucket, Phase

__all__ = ["CaptureReport", "GraphBudget", "capture_order"]

_UNIT_WEIGHT = 0.001
"""Weight before anything was captured: the first bucket is always estimated to cost nothing."""


def capture_order(buckets: Iterable[Bucket], strategy: str) -> list[Bucket]:
    """Return buckets in the order of their capture. Pure.

    Args:
        buckets: Of one phase.
        strategy: ``min_tokens``: the fewest tokens first. ``max_bs``: the largest batch first.
    """
    if strategy == "max_bs":
        return sorted(buckets, key=lambda bucket: (-bucket.batch_size, _length(bucket)))
    return sorted(buckets, key=lambda bucket: (bucket.batch_size * _length(bucket), _length(bucket), bucket.batch_size))


def _length(bucket: Bucket) -> int:
    """Return what a bucket's cost grows with beside its batch: queries of a prefill, blocks of a decode."""
    return bucket.num_blocks if bucket.phase is Phase.DECODE else bucket.query_len


@attrs.define
class CaptureReport:
    """What was captured of one phase.

    Attributes:
        order: Every bucket, in the order in which it was tried.
        captured: Those that are graphs, in the order of their capture.
        used_bytes: Memory of their graphs.
        is_complete: Every bucket is a graph.
    """

    order: list[Bucket]
    captured: list[Bucket] = attrs.field(factory=list)
    used_bytes: int = 0
    is_complete: bool = False
    weight: float = _UNIT_WEIGHT

    @property
    def captured_ratio(self) -> float:
        """Share of the buckets that are graphs; 1 if there is none."""
        return len(self.captured) / len(self.order) if self.order else 1.0


class GraphBudget:
    """Captures what the budget pays for.

    Args:
        budget_bytes: For all graphs.
        prompt_ratio: Share of it that prefills have at first, 0 to 1.
        capture: Captures one bucket, given its index in the order; returns the memory it took, bytes (the most over ranks).
    """

    def __init__(self, budget_bytes: int, *, prompt_ratio: float, capture: Callable[[Bucket, int], int]) -> None:
        self._budget = budget_bytes
        self._prompt_budget = prompt_ratio * budget_bytes
        self._capture = capture

    def run(self, prefills: list[Bucket], decodes: list[Bucket]) -> tuple[CaptureReport, CaptureReport]:
        """Capture both phases; buckets are given in the order of their capture."""
        prompt, decode = CaptureReport(prefills), CaptureReport(decodes)
        self._round(prompt, self._prompt_budget)
        self._round(decode, self._budget - self._prompt_budget)
        left = self._budget - prompt.used_bytes - decode.used_bytes
        if left > 0 and decode.is_complete and not prompt.is_complete:
            self._round(prompt, left)
        elif left > 0 and prompt.is_complete and not decode.is_complete:
            self._round(decode, left)
        return prompt, decode

    def _round(self, report: CaptureReport, available: float) -> None:
        report.is_complete = True
        done = set(report.captured)
        for index, bucket in enumerate(report.order):
            weight = bucket.batch_size * (1 if bucket.phase is Phase.DECODE else bucket.query_len)
            # As in the source, a bucket is weighed before it is known to be captured already: one that no longer fits
            # leaves the phase incomplete.
            if weight / report.weight * report.used_bytes >= available:
                report.is_complete = report.is_complete and bucket in done
                continue
            if bucket in done:
                continue
            used = self._capture(bucket, index)
            available -= used
            report.used_bytes += used
            report.weight += weight
            report.captured.append(bucket)
