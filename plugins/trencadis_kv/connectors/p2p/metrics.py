"""Metrics of the connector between engines: transfers, and blocks held for other engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trencadis_kv.connectors.p2p.peers import Peers
from trencadis_kv.connectors.p2p.remote_prefills import Holds
from trencadis_kv.store.counters import TransferCounters

__all__ = ["P2PMetrics"]


class P2PMetrics(TransferCounters):
    """Counters of one connector; sent blocks have the direction ``send``. From any thread.

    Args:
        holds: Blocks held for other engines.
        peers: Allowed engines and their failures.
        name: Name of the connector.
    """

    def __init__(self, holds: Holds, peers: Peers, *, name: str = "p2p") -> None:
        super().__init__(name)
        self._registry.register(_State(self._name, holds, peers))
        self._delegated = self._counter(
            "delegated_prefills",
            "Prompts delegated to another engine, by result: served, failed, withdrawn, or declined here.",
            "result",
        )
        self._responses = self._counter(
            "prefill_responses",
            "Prefill responses of other engines, by the first token: given; none, they could not choose it; or unasked, not asked for.",
            "token",
        )
        self._pushed = self._counter(
            "pushed_bytes", "Bytes of blocks sent along with prefill responses, or received so.", "end"
        )
        self._pulled = self._counter(
            "pulled_bytes", "Bytes of blocks pulled, by the way they came: connection, shared memory or nixl.", "way"
        )
        self._aside = self._gauge("push_bytes", "Bytes of memory set aside for blocks that are sent along.")
        self._remote_prefills = self._gauge(
            "remote_prefills_running", "Prompts of other engines that are being computed here."
        )
        self._running = self._gauge(
            "delegated_prefills_running", "Prompts of this engine that another one is computing."
        )
        self._engines = self._gauge("prefill_engines", "Engines that compute prompts for this one, and take some now.")

    def count_delegated(self, result: str) -> None:
        """Count a delegated prefill by its result."""
        self._delegated.labels(self._name, result).inc()

    def count_response(self, token: str) -> None:
        """Count a prefill response by its first token."""
        self._responses.labels(self._name, token).inc()

    def pushed(self, end: str, *, num_bytes: int) -> None:
        """Count pushed blocks.

        Args:
            end: ``sent`` or ``received``.
            num_bytes: Size of the blocks in the KV pool, bytes.
        """
        self._pushed.labels(self._name, end).inc(num_bytes)

    def pulled(self, way: str, *, num_bytes: int) -> None:
        """Count pulled blocks.

        Args:
            way: Name of a transport, or ``connection``.
            num_bytes: Size of the blocks in the KV pool, bytes.
        """
        self._pulled.labels(self._name, way).inc(num_bytes)

    def watch_push_bytes(self, num_bytes: Callable[[], int]) -> None:
        """Set the function that reads the gauge."""
        self._aside.labels(self._name).set_function(lambda: float(num_bytes()))

    def watch_remote_prefills(self, num_remote_prefills: Callable[[], int]) -> None:
        """Set the function that reads the gauge."""
        self._remote_prefills.labels(self._name).set_function(lambda: float(num_remote_prefills()))

    def watch_delegated(self, num_away: Callable[[], int]) -> None:
        """Set the function that reads the gauge."""
        self._running.labels(self._name).set_function(lambda: float(num_away()))

    def watch_engines(self, num_engines: Callable[[], int]) -> None:
        """Set the function that reads the gauge."""
        self._engines.labels(self._name).set_function(lambda: float(num_engines()))

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"trencadis_kv_{name}", text, ["connector"], registry=self._registry)


class _State(Collector):
    """Collects metrics of holds and peers."""

    def __init__(self, name: str, holds: Holds, peers: Peers) -> None:
        self._name = name
        self._holds = holds
        self._peers = peers

    def collect(self) -> Iterator[Metric]:
        """Yield the present values."""
        ends = CounterMetricFamily(
            "trencadis_kv_holds", "Prefills kept for other engines, by how that ended.", labels=("connector", "end")
        )
        for end, num in sorted(self._holds.ends.items()):
            ends.add_metric((self._name, end), num)
        yield ends
        for name, text, value in (
            ("held_prefills", "Prefills kept for other engines now.", self._holds.num_holds),
            ("held_bytes", "Bytes of blocks kept for other engines now.", self._holds.num_bytes),
            ("peers_down", "Engines that are left alone because they could not be pulled from.", self._peers.num_down),
        ):
            gauge = GaugeMetricFamily(f"trencadis_kv_{name}", text, labels=("connector",))
            gauge.add_metric((self._name,), value)
            yield gauge
