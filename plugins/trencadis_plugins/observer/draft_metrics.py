"""Metrics of drafts that a plain counter cannot hold: by position, and their mean length."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from trencadis.records import StepStats

__all__ = ["DraftMetrics"]

_BY_POSITION = {
    "draft_tokens_by_position": ("Draft tokens verified, by the drafts before them.", "num_drafted_by_position"),
    "accepted_tokens_by_position": ("Draft tokens emitted, by the drafts before them.", "num_accepted_by_position"),
}


class DraftMetrics:
    """Counts drafts by position: how many drafts lie before one.

    Args:
        registry: Where the metrics are.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._by_position = [
            (attribute, Counter(f"trencadis_{name}", text, ["position"], registry=registry))
            for name, (text, attribute) in _BY_POSITION.items()
        ]
        self._mean_length = Gauge(
            "trencadis_mean_acceptance_length",
            "Mean tokens of a sequence in a step with drafts: those that stood, and one.",
            registry=registry,
        )
        self._num_sequences = self._num_accepted = 0

    def count(self, stats: StepStats) -> None:
        """Count a step; one without drafts changes nothing."""
        if not stats.num_drafted_sequences:
            return
        for attribute, counter in self._by_position:
            for position, amount in enumerate(getattr(stats, attribute)):
                counter.labels(str(position)).inc(amount)
        self._num_sequences += stats.num_drafted_sequences
        self._num_accepted += stats.num_accepted_tokens
        self._mean_length.set(1 + self._num_accepted / self._num_sequences)
