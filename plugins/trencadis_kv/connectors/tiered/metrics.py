"""What the tiered connector counts, and what its children do, in one text."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

__all__ = ["TierCounters", "merged"]

logger = logging.getLogger("trencadis.kv")


class TierCounters:
    """Totals since the start by child."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._lookups = self._counter(
            "lookups", "Look-ups of a child: hit, miss, timeout, raised or skipped.", "result"
        )
        self._loads = self._counter("loads", "Loads from a child: loaded or failed.", "result")
        self._promoted = self._counter("promoted_blocks", "Blocks loaded from a later child and offered to this one.")
        self._state = Gauge(
            "trencadis_kv_tier_state",
            "0: the child is used; 1: it is being tried; 2: it is left alone; 3: it is closed.",
            ["tier"],
            registry=self._registry,
        )

    def looked_up(self, tier: str, result: str) -> None:
        """Count a look-up."""
        self._lookups.labels(tier, result).inc()

    def ended(self, tier: str, result: str) -> None:
        """Count a load."""
        self._loads.labels(tier, result).inc()

    def promoted(self, tier: str, num_blocks: int) -> None:
        """Count blocks."""
        self._promoted.labels(tier).inc(num_blocks)

    def watch(self, tier: str, state: Callable[[], float]) -> None:
        """Read a child's state when it is read."""
        self._state.labels(tier).set_function(state)

    def value(self, name: str, **labels: str) -> float:
        """Return a sample, such as ``value("lookups_total", tier="redis", result="hit")``; 0 if there is none."""
        found = self._registry.get_sample_value(f"trencadis_kv_tier_{name}", labels)
        return 0.0 if found is None else found

    def text(self) -> str:
        """Return all of them."""
        return generate_latest(self._registry).decode()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"trencadis_kv_tier_{name}", text, ["tier", *labels], registry=self._registry)


def merged(texts: Mapping[str, str]) -> str:
    """Return the metrics of all children in one text, each sample with the child's name in the label ``tier``.

    Args:
        texts: By child; one that cannot be read is left out, with a warning.
    """
    families: dict[str, Metric] = {}
    for tier, text in texts.items():
        try:
            found = list(text_string_to_metric_families(text))
        except (ValueError, KeyError):
            logger.warning("The metrics of the KV connector %s cannot be read.", tier, exc_info=True)
            continue
        for family in found:
            one = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            one.samples += [sample._replace(labels={"tier": tier, **sample.labels}) for sample in family.samples]
    registry = CollectorRegistry()
    registry.register(_Families(families.values()))
    return generate_latest(registry).decode()


class _Families(Collector):
    """Shows what was gathered."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)
