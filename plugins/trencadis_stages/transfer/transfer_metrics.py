"""The engine's metrics of KV transfers, for Prometheus, beside the connector's own."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trencadis_stages.transfer.transfers import Transfers

__all__ = ["transfer_metrics"]


def transfer_metrics(transfers: Transfers) -> str:
    """Return the engine's counts in Prometheus' text format. Pure."""
    registry = CollectorRegistry()
    registry.register(_Books(transfers))
    return generate_latest(registry).decode()


class _Books(Collector):
    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers

    def collect(self) -> Iterable[Metric]:
        books = self._transfers
        connector = books.connector
        yield _counter("loads", "KV loads that were started.", books.num_loads)
        ends = CounterMetricFamily(
            "trencadis_transfer_ended_loads",
            "KV loads that ended: loaded whole; failed, because the report said so or the time was up; or cancelled.",
            labels=["end"],
        )
        ends.add_metric(["loaded"], books.num_loaded)
        ends.add_metric(["failed"], books.num_failed_loads)
        ends.add_metric(["cancelled"], books.num_cancelled_loads)
        yield ends
        yield _counter("unused_hits", "Look-ups that found something nothing was loaded of.", books.num_unused)
        yield _counter("late_lookups", "Look-ups that were pending for too long and given up.", books.num_late_lookups)
        yield _counter(
            "ignored_reports", "Entries of reports that were said twice, or that were not awaited.", books.num_ignored
        )
        firsts = CounterMetricFamily(
            "trencadis_transfer_first_tokens",
            "First tokens that other engines chose: taken, or not, and why: late, vocabulary, forbidden, logprobs.",
            labels=["result"],
        )
        for result, num in sorted(books.first_token_results.items()):
            firsts.add_metric([result], num)
        yield firsts
        yield _counter(
            "connector_errors",
            "Calls of the KV connector that raised or broke the contract.",
            connector.num_errors,
        )
        yield _gauge("waiting_sequences", "Waiting sequences whose KV is being loaded.", books.num_waiting_for_kv)
        yield _gauge(
            "pinned_blocks", "KV blocks that stay allocated only because of a transfer.", books.num_pinned_blocks
        )
        is_on = not connector.is_off
        yield _gauge("connector_on", "1: the KV connector is asked; 0: it was switched off.", int(is_on))


def _counter(name: str, text: str, value: int) -> Metric:
    return CounterMetricFamily(f"trencadis_transfer_{name}", text, value=value)


def _gauge(name: str, text: str, value: int) -> Metric:
    return GaugeMetricFamily(f"trencadis_transfer_{name}", text, value=value)
