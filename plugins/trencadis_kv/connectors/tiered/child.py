"""One child of the tiered connector, guarded: its exceptions are caught, and one that keeps failing is not used for a while.

asked ─ raises, times out, loads fail ▶ left alone for a while ▶ asked again
       └ raises in a call that keeps blocks valid, or never releases blocks ▶ closed permanently
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from trencadis.errors import ConfigValueError
from trencadis.faults import FaultLog, as_words, reraise_interrupt
from trencadis.interfaces import KVSchedulerSide, Lookup, SupportsRemoteWorkers
from trencadis.records import KVLayout, Request, TransferCause
from trencadis_kv.store.breaker import Breaker, BreakerState
from trencadis_kv.store.cost import MovingLine

__all__ = ["CLOSED", "Child", "TierCounters", "merged"]

logger = logging.getLogger("trencadis.kv")


class TierCounters:
    """Metrics by child."""

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
        """Set the function that reads a child's state."""
        self._state.labels(tier).set_function(state)

    def value(self, name: str, **labels: str) -> float:
        """Return a sample, such as ``value("lookups_total", tier="redis", result="hit")``; 0 if there is none."""
        found = self._registry.get_sample_value(f"trencadis_kv_tier_{name}", labels)
        return 0.0 if found is None else found

    def text(self) -> str:
        """Return all metrics, in Prometheus' text format."""
        return generate_latest(self._registry).decode()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"trencadis_kv_tier_{name}", text, ["tier", *labels], registry=self._registry)


def merged(texts: Mapping[str, str]) -> str:
    """Return the metrics of all children in one text, each sample with the child's name in the label ``tier``.

    Args:
        texts: Metrics by child, in Prometheus' text format; one that cannot be read is left out, with a warning.
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
    """Collector of gathered metric families."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


T = TypeVar("T")

CLOSED = "its connector was closed"
"""Cause of loads from a child whose worker side was closed."""

_CLOSED_STATE = 3
_EVERYDAY = frozenset({TransferCause.EVICTED, TransferCause.FULL, TransferCause.CANCELLED, TransferCause.INCOMPATIBLE})


class Child:
    """The scheduler side of one child.

    Args:
        name: Name of the child's component.
        label: Name of the component and its distribution, for messages.
        side: Scheduler side of the child.
        breaker: Circuit breaker that decides whether the child is used.
        counters: Metrics of all children.
        probe_s: Seconds after which a look-up that probes a failing child counts as unanswered.

    Attributes:
        name: Name of the child's component.
        is_closed: True once it is permanently closed; it is not called any more.
        load_s: Regression of the time of a load, seconds, over its number of tokens.
    """

    def __init__(
        self,
        name: str,
        side: KVSchedulerSide,
        *,
        breaker: Breaker,
        counters: TierCounters,
        probe_s: float,
        label: str = "",
    ) -> None:
        self.name = name
        self._label = label if label not in ("", name) else f"the KV connector {name}"
        self._faults = FaultLog(logger)
        self.is_closed = False
        self.load_s = MovingLine()
        self._side = side
        self._breaker = breaker
        self._counters = counters
        self._probe_s = probe_s
        counters.watch(name, lambda: float(_CLOSED_STATE if self.is_closed else breaker.state))

    @property
    def is_used(self) -> bool:
        """True while blocks are saved to it."""
        return not self.is_closed and self._breaker.allows

    def can_look_up(self) -> bool:
        """True if the next look-up includes it; once in a while also if it keeps failing."""
        if self._breaker.half_open_s > self._probe_s:  # the request was aborted, or served by another child
            self._breaker.probed(works=False)
        asked = not self.is_closed and (self._breaker.allows or self._breaker.wants_probe())
        if not asked:
            self._counters.looked_up(self.name, "skipped")
        return asked

    def lookup(self, request: Request, *, block_hashes: Sequence[bytes], num_local_tokens: int) -> Lookup:
        """Return its answer; a miss if it raises."""
        found = self.call(
            "lookup",
            lambda side: side.lookup(request, block_hashes=block_hashes, num_local_tokens=num_local_tokens),
            None,
        )
        if found is None:
            self._unanswered("raised")
            return Lookup()
        if found.approximate:
            # Approximate KV differs from what other children hold under the same hashes: such a connector must be used
            # alone.
            self._counters.looked_up(self.name, "declined")
            return Lookup()
        if not found.pending:
            if self._breaker.state is BreakerState.HALF_OPEN:
                self._breaker.probed(works=True)
            self._counters.looked_up(self.name, "hit" if found.num_tokens > num_local_tokens else "miss")
        return found

    def unused(self, transfer_id: int) -> None:
        """Notify it that its hit is not loaded."""
        self.call("on_unused", lambda side: side.on_unused(transfer_id), None)

    def timed_out(self) -> None:
        """Record that it did not answer in time."""
        self._breaker.failed(TransferCause.DEADLINE)
        self._unanswered("timeout")

    def loaded(self, *, num_tokens: int, seconds: float) -> None:
        """Record a successful load."""
        self.load_s.add(num_tokens, seconds)
        self._counters.ended(self.name, "loaded")

    def failed(self, cause: str, *, num_valid_tokens: int = 0) -> None:
        """Record a failed load; a partial one of unknown cause is not a fault."""
        self._counters.ended(self.name, "failed")
        known = cause in set(TransferCause)
        if not known and not num_valid_tokens:
            self._breaker.failed(TransferCause.RAISED)
        elif known and cause not in _EVERYDAY:
            self._breaker.failed(cause)

    def ready(self, layout: KVLayout) -> None:
        """Pass it the KV layout; closed if it raises.

        Raises:
            ConfigValueError: A resource that its config names is required, and cannot be used.
        """
        self._at_start("on_ready", lambda: self._side.on_ready(layout))

    def join(self, layouts: Sequence[KVLayout]) -> None:
        """Pass it the layouts of ranks that run its worker sides; closed if it does not support them, or raises.

        Raises:
            ConfigValueError: The connector's config does not fit these layouts.
        """
        side = self._side
        if isinstance(side, SupportsRemoteWorkers):
            self._at_start("on_ranks", lambda: side.on_ranks(layouts))
        else:
            logger.error("%s does not work among ranks; serving goes on without it.", self._label)
            self.close()

    def _at_start(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except ConfigValueError:
            raise
        except BaseException as error:
            reraise_interrupt(error)
            said = f"{self._label} cannot be used: it raised {as_words(error)} in {name}(); serving goes on without it."
            self._faults.say(name, said, error=error, level=logging.ERROR)
            self.close()

    def call(self, name: str, call: Callable[[KVSchedulerSide], T], otherwise: T) -> T:
        """Return the result of a call; ``otherwise`` if the child is closed or raises.

        Args:
            name: Name of the method, for the log.
            call: Function to call with the scheduler side.
            otherwise: Result if the call cannot be made.
        """
        if self.is_closed:
            return otherwise
        try:
            return call(self._side)
        except BaseException as error:
            reraise_interrupt(error)
            self._breaker.failed(TransferCause.RAISED)
            said = f"{self._label} raised {as_words(error)} in {name}(); the others go on."
            self._faults.say(name, said, error=error)
            return otherwise

    def has(self, capability: type[Any]) -> bool:
        """Return whether its scheduler side has a capability, such as ``SupportsHandover``."""
        return isinstance(self._side, capability)

    def call_capability(self, capability: type[Any], name: str, call: Callable[[Any], T], otherwise: T) -> T:
        """Return the result of a call of a capability; ``otherwise`` if the child lacks it, is closed or raises."""
        side = self._side
        return self.call(name, lambda _: call(side), otherwise) if isinstance(side, capability) else otherwise

    def call_or_close(self, name: str, call: Callable[[KVSchedulerSide], None]) -> bool:
        """Make a call that must succeed for blocks to stay valid; a child that raises is closed, and False returned."""
        if self.is_closed:
            return False
        try:
            call(self._side)
        except BaseException as error:
            reraise_interrupt(error)
            said = f"{self._label} raised {as_words(error)} in {name}(); it is closed."
            self._faults.say(name, said, error=error, level=logging.ERROR)
            self.close()
        return not self.is_closed

    def close(self) -> None:
        """Close it permanently; may be called twice."""
        self.is_closed = True
        try:
            self._side.close()
        except BaseException as error:
            reraise_interrupt(error)
            self._faults.say("close", f"{self._label} raised {as_words(error)} in close().", error=error)

    def _unanswered(self, result: str) -> None:
        if self._breaker.state is BreakerState.HALF_OPEN:
            self._breaker.probed(works=False)
        self._counters.looked_up(self.name, result)
