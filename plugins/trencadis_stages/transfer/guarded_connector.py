"""Both sides of a KV connector, guarded: an exception is a miss, and a scheduler side that keeps raising is switched off for a while.

The capabilities of a scheduler side are found once, here: an attribute that is None stands for one that it lacks, and is not called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, cast

from trencadis.activity import ACTIVITY
from trencadis.engine.guard import Contained
from trencadis.errors import ContractError, PluginLoadError, TrencadisError
from trencadis.faults import CallMeter, as_words, reraise_interrupt
from trencadis.interfaces import (
    KVPool,
    KVSchedulerSide,
    KVWorkerSide,
    Lookup,
    SupportsHandover,
    SupportsLayerwise,
    SupportsMetrics,
    SupportsRemotePrefill,
    SupportsRemoteScheduler,
    SupportsRemoteWorkers,
    SupportsStepTimes,
)
from trencadis.interfaces.laws import Rule
from trencadis.records import ConnectorReport, FailedLoad, KVLayout, Request

__all__ = ["GuardedConnector", "GuardedWorker"]


_CLOSE: Final = Rule(method="close", is_told=True, waits=True)
_WANTS_LAYERS: Final = Rule(method="wants_layers", otherwise=False)


class GuardedConnector(Contained[KVSchedulerSide]):
    """Calls a scheduler side; exceptions are caught.

    Args:
        side: The scheduler side.
        label: Names the component and its distribution in messages.
        meter: Measures its calls; one that is too slow is switched off.

    Attributes:
        handover: Guarded calls as :class:`~trencadis.interfaces.SupportsHandover`; None if it does not.
        remote_prefill: Guarded calls as :class:`~trencadis.interfaces.SupportsRemotePrefill`; None if it does not.
        is_layerwise: It has ``on_layerwise``.
        is_timed: It has ``on_step``.
    """

    consequence = "; counted as a miss."
    off = (
        " and is switched off {how_long}; serving goes on without it. Mend it, or choose another in kv_connector.name."
    )
    back = "is asked again"
    max_errors = 3
    """An exception may be one request's bad luck; three in a row are the connector's."""

    on_unused: Callable[[int], None]
    on_computed: Callable[..., None]
    on_finished: Callable[..., int | None]
    on_cancelled: Callable[[int], None]
    take_message: Callable[[], bytes]
    on_worker_message: Callable[[int, bytes], None]
    on_report: Callable[[ConnectorReport], None]
    on_step: Callable[..., None]

    def __init__(
        self, side: KVSchedulerSide, *, label: str = "the KV connector", meter: CallMeter | None = None
    ) -> None:
        super().__init__(
            KVSchedulerSide,
            label,
            side,
            meter=meter,
            capabilities=(
                SupportsHandover,
                SupportsRemotePrefill,
                SupportsLayerwise,
                SupportsStepTimes,
                SupportsRemoteWorkers,
            ),
        )
        self.handover = cast("SupportsHandover", self.ask) if isinstance(side, SupportsHandover) else None
        self.remote_prefill = (
            cast("SupportsRemotePrefill", self.ask) if isinstance(side, SupportsRemotePrefill) else None
        )
        self.is_layerwise = isinstance(side, SupportsLayerwise)
        self.is_timed = isinstance(side, SupportsStepTimes)

    def lookup(
        self, request: Request, *, block_hashes: Sequence[bytes], num_local_tokens: int, is_used: Callable[[int], bool]
    ) -> Lookup:
        """Return the prefix that can be loaded; a miss if the answer breaks the contract.

        Args:
            request: Whose prompt.
            block_hashes: Hashes of its full blocks.
            num_local_tokens: Tokens that the local prefix cache has.
            is_used: Whether a transfer id names a load or pinned blocks already.
        """
        self._is_used = is_used
        return self.ask.lookup(request, block_hashes=block_hashes, num_local_tokens=num_local_tokens)

    def _check_lookup(self, found: Lookup, *_: object) -> Lookup:
        if not found.pending and found.num_tokens and self._is_used(found.transfer_id):
            raise ContractError(f"lookup gave transfer id {found.transfer_id} a second time.")
        return found

    def on_allocated(self, transfer_id: int, *, blocks: Sequence[int], block_hashes: Sequence[bytes]) -> bool:
        """Forward the blocks to load into; False if it raised: the load must be given up."""
        tell = cast("Callable[..., bool]", self.ask.on_allocated)
        return tell(transfer_id, blocks=blocks, block_hashes=block_hashes)

    def on_layerwise(self, transfer_id: int) -> bool:
        """Forward that a step waits for a load layer by layer; False if it raised or is not supported."""
        tell = cast("Callable[[int], bool]", cast("SupportsLayerwise", self.ask).on_layerwise)
        return self.is_layerwise and tell(transfer_id)

    def on_failed(self, request: Request, failed: FailedLoad) -> bool:
        """Return whether a sequence whose load failed should be looked up again."""
        return self.ask.on_failed(request, failed) == "retry"

    def metrics(self) -> str:
        """Return the connector's metrics; empty if it has none."""
        if not isinstance(self.strategy, SupportsMetrics):
            return ""
        text: object = self._contained("metrics", self.strategy.metrics, "")
        if isinstance(text, str):
            return text
        said = f"{self.label} metrics() returned {type(text).__name__}, which is no text."
        self._faults.say(f"{self.label}.metrics returned", said)
        return ""

    def close(self) -> None:
        """Close it; may be called twice."""
        self._is_closed = True
        self._contained("close", self.strategy.close, None)

    def _contained(self, method: str, call: Callable[[], Any], otherwise: Any) -> Any:
        """Return the result of a call whose failure does not count towards switching the side off."""
        try:
            return call()
        except BaseException as error:
            reraise_interrupt(error)
            said = f"{self.label} raised {as_words(error)} in {method}()."
            self._faults.say(f"{self.label}.{method}", said, error=error)
            return otherwise


class GuardedWorker(Contained[KVWorkerSide], KVWorkerSide, SupportsRemoteScheduler):
    """Calls a worker side; after the start exceptions are caught. On the backend's thread.

    A call that raises has brought nothing: what it was to load is computed once the load times out.

    Args:
        side: The worker side.
        label: Names the component and its distribution in messages.
        meter: Measures the calls that do not wait; one that is too slow is warned about.
        remake: Makes the same in the process of a rank, to which it travels.
    """

    consequence = " of its worker side; the step goes on without it."

    def __init__(
        self,
        side: KVWorkerSide,
        *,
        label: str = "the KV connector",
        meter: CallMeter | None = None,
        remake: Callable[[], KVWorkerSide] | None = None,
    ) -> None:
        self._remake = remake
        super().__init__(
            KVWorkerSide,
            label,
            side,
            meter=meter or CallMeter(label, thread=ACTIVITY.device),
        )
        self._close = self._made(_CLOSE, side.close)
        self._wants_layers = self._made(_WANTS_LAYERS, lambda: bool(side.wants_layers))

    def __reduce__(self) -> tuple[Callable[[], KVWorkerSide], tuple[()]]:
        if self._remake is None:
            raise TypeError(f"{self.label} cannot travel to another process")
        return self._remake, ()

    def register(self, kv_cache: KVPool) -> None:
        """Hand over the device's KV cache.

        Raises:
            PluginLoadError: It raised.
        """
        self._at_start("register", lambda: self.strategy.register(kv_cache))

    def on_ranks(self, layouts: Sequence[KVLayout], *, rank: int) -> None:
        """Forward what the ranks hold.

        Raises:
            PluginLoadError: It raised, or has no scheduler side in another process.
        """
        side = self.strategy
        if not isinstance(side, SupportsRemoteScheduler):
            raise PluginLoadError(
                f"{self.label} provides kv_connector.ranks, and its worker side has no on_ranks().",
                hint="Mend it, or choose another in kv_connector.name.",
            )
        self._at_start("on_ranks", lambda: side.on_ranks(layouts, rank=rank))

    def _at_start(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except TrencadisError:
            raise
        except BaseException as error:
            reraise_interrupt(error)
            raise PluginLoadError(
                f"{self.label} raised {as_words(error)} in {name}().",
                hint="Mend it, or choose another in kv_connector.name.",
            ) from error

    def expect_layers(self) -> None:
        """Announce that blocks to be saved may be copied out during the step."""
        self.ask.expect_layers()

    def begin_step(self, message: bytes) -> None:
        """Forward the scheduler side's message."""
        self.ask.begin_step(message)

    @property
    def wants_layers(self) -> bool:
        """Whether the current step has to wait for layers."""
        wants: bool = self._wants_layers()
        return wants

    def wait_layer(self, layer: int, *, budget_s: float) -> bool:
        """Wait for a layer; False if the wait raised."""
        return bool(self.ask.wait_layer(layer, budget_s=budget_s))

    def end_step(self) -> None:
        """Forward the end of the step."""
        self.ask.end_step()

    def poll(self) -> ConnectorReport:
        """Return the report; an empty one if the answer is not a report."""
        return self.ask.poll()

    def close(self) -> None:
        """Close it."""
        self._close()

    def _note_slow(self, rule: Rule, took_s: float, num_budgets: float) -> None:
        """Only warn: steps need it."""
        if not rule.waits and (slow := self._meter.overran(rule.method, took_s)):
            self._faults.say(f"{self.label}.{rule.method} is slow", f"{self.label} {slow}; steps wait for it.")
