"""Both sides of a KV connector, guarded: an exception is a miss, and a scheduler side that keeps raising is switched off for a while.

The capabilities of a scheduler side are found once, here: an attribute that is None stands for one that it lacks, and is not called.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from trencadis.activity import ACTIVITY
from trencadis.errors import ContractError, PluginLoadError, TrencadisError
from trencadis.faults import CallMeter, FaultLog, as_words, reraise_interrupt, shown
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
from trencadis.records import ConnectorReport, FailedLoad, FirstToken, KVLayout, Request
from trencadis.records.request import transfer_table

__all__ = ["GuardedConnector", "GuardedHandover", "GuardedRemotePrefill", "GuardedWorker"]

logger = logging.getLogger("trencadis.engine")

T = TypeVar("T")

_MAX_ANSWERS = 65_536
_MAX_ERRORS = 3
"""An exception may be one request's bad luck; three in a row are the connector's."""


class _Guard:
    """Calls of one scheduler side; their exceptions are caught and logged.

    Args:
        label: Names the component and its distribution in messages.
        meter: Measures its calls; one that is too slow is switched off.

    Attributes:
        label: As given.
        num_errors: Calls that raised or broke the contract.
    """

    def __init__(self, label: str, meter: CallMeter) -> None:
        self.label = label
        self._meter = meter
        self._faults = FaultLog(logger)
        self._num_in_a_row = 0
        self._is_closed = False
        self.num_errors = 0

    @property
    def is_off(self) -> bool:
        """Whether the side is switched off for a while, or closed: only calls that are made in any case are made."""
        if self._meter.is_due:
            self._meter.switch_on()
            logger.warning("%s is asked again.", self.label)
        return self._meter.is_off or self._is_closed

    def close(self) -> None:
        """Make only calls that are made in any case from now on."""
        self._is_closed = True

    def call(self, name: str, call: Callable[[], T], otherwise: T, *, always: bool = False) -> T:
        """Return what a call returns; ``otherwise`` if it raises, or if the side is off and the call is not ``always`` made."""
        if self.is_off and not always:
            return otherwise
        meter = self._meter
        began = meter.begin()
        try:
            result = call()
        except BaseException as error:
            meter.end(began)
            reraise_interrupt(error)
            self._raised(name, error)
            return otherwise
        took_s = meter.end(began)
        if took_s > meter.budget_s and (slow := meter.overran(name, took_s)):
            self._switch_off(slow)
        self._num_in_a_row = 0
        return result

    def contained(self, name: str, call: Callable[[], T], otherwise: T) -> T:
        """Return the result of a call whose failure does not count towards switching the side off."""
        try:
            return call()
        except BaseException as error:
            reraise_interrupt(error)
            self.log_fault(name, f"raised {as_words(error)} in {name}().", error)
            return otherwise

    def log_fault(self, name: str, fault: str, error: BaseException | None = None) -> None:
        """Log a fault of a method, at a limited rate."""
        self._faults.say(f"{self.label}.{name}", f"{self.label} {fault}", error=error)

    def _raised(self, name: str, error: BaseException) -> None:
        self.num_errors += 1
        self._num_in_a_row += 1
        self.log_fault(name, f"raised {as_words(error)} in {name}(); counted as a miss.", error)
        if self._num_in_a_row >= _MAX_ERRORS:
            self._switch_off(f"raised {_MAX_ERRORS} times in a row")

    def _switch_off(self, fault: str) -> None:
        if not self._meter.is_off:
            self._num_in_a_row = 0
            logger.error(
                "%s %s and is switched off %s; serving goes on without it. Mend it, or choose another in kv_connector.name.",
                self.label,
                fault,
                self._meter.switch_off(fault),
            )


class GuardedHandover:
    """Calls of a scheduler side with ``SupportsHandover``; exceptions are caught."""

    def __init__(self, side: SupportsHandover, guard: _Guard) -> None:
        self._side = side
        self._call = guard.call

    def finished_params(self, request: Request) -> Mapping[str, Any] | None:
        """Return the transfer parameters for the engine that continues a request, or None; a value that JSON cannot hold is a fault."""
        return self._call("finished_params", lambda: transfer_table(self._side.finished_params(request)), None)

    def on_cache_hit(self, request: Request, *, num_tokens: int) -> None:
        """Forward how much of a request's prompt was cached."""
        self._call("on_cache_hit", lambda: self._side.on_cache_hit(request, num_tokens=num_tokens), None)

    def on_rejected(self, transfer_params: Mapping[str, Any]) -> None:
        """Forward that a request was rejected."""
        self._call("on_rejected", lambda: self._side.on_rejected(transfer_params), None)

    def on_abandoned(self, request: Request) -> None:
        """Forward that a request will not be looked up again; also to a side that is off."""
        self._call("on_abandoned", lambda: self._side.on_abandoned(request), None, always=True)

    def on_role(self, role: str) -> None:
        """Forward the engine's role."""
        self._call("on_role", lambda: self._side.on_role(role), None)


class GuardedRemotePrefill:
    """Calls of a scheduler side with ``SupportsRemotePrefill``; exceptions are caught."""

    def __init__(self, side: SupportsRemotePrefill, guard: _Guard) -> None:
        self._side = side
        self._call = guard.call

    def on_waker(self, wake: Callable[[], None]) -> None:
        """Forward the function that wakes the engine."""
        self._call("on_waker", lambda: self._side.on_waker(wake), None)

    def take_requests(self) -> Sequence[Request]:
        """Return new requests of other engines."""
        return self._call("take_requests", lambda: _all_of(self._side.take_requests(), Request), ())

    def take_withdrawn(self) -> Sequence[str]:
        """Return ids of such requests that were withdrawn."""
        return self._call("take_withdrawn", lambda: _all_of(self._side.take_withdrawn(), str), ())

    def on_request_token(self, request_id: str, first: FirstToken) -> None:
        """Forward the first token of such a request."""
        self._call("on_request_token", lambda: self._side.on_request_token(request_id, first), None)

    def on_request_ended(self, request_id: str, *, transfer_params: Mapping[str, Any] | None, error: str) -> None:
        """Forward that such a request ended; also to a side that is off."""
        self._call(
            "on_request_ended",
            lambda: self._side.on_request_ended(request_id, transfer_params=transfer_params, error=error),
            None,
            always=True,
        )

    def on_backlog(self, num_tokens: int) -> None:
        """Forward the number of queued tokens."""
        self._call("on_backlog", lambda: self._side.on_backlog(num_tokens), None)


class GuardedConnector:
    """Calls a scheduler side; exceptions are caught.

    Args:
        side: The scheduler side.
        label: Names the component and its distribution in messages.
        meter: Measures its calls; one that is too slow is switched off.

    Attributes:
        handover: Its calls as :class:`~trencadis.interfaces.SupportsHandover`; None if it does not.
        remote_prefill: Its calls as :class:`~trencadis.interfaces.SupportsRemotePrefill`; None if it does not.
        is_layerwise: It has ``on_layerwise``.
        is_timed: It has ``on_step``.
    """

    def __init__(
        self, side: KVSchedulerSide, *, label: str = "the KV connector", meter: CallMeter | None = None
    ) -> None:
        self._side = side
        self._guard = guard = _Guard(label, meter or CallMeter(label))
        self._call = guard.call
        self.handover = GuardedHandover(side, guard) if isinstance(side, SupportsHandover) else None
        self.remote_prefill = GuardedRemotePrefill(side, guard) if isinstance(side, SupportsRemotePrefill) else None
        self.is_layerwise = isinstance(side, SupportsLayerwise)
        self.is_timed = isinstance(side, SupportsStepTimes)

    @property
    def is_off(self) -> bool:
        """Whether it was switched off or closed: no more look-ups or saves."""
        return self._guard.is_off

    @property
    def label(self) -> str:
        """Names the component and its distribution in messages."""
        return self._guard.label

    @property
    def num_errors(self) -> int:
        """Calls that raised or broke the contract."""
        return self._guard.num_errors

    def lookup(
        self, request: Request, *, block_hashes: Sequence[bytes], num_local_tokens: int, is_used: Callable[[int], bool]
    ) -> Lookup:
        """Return the prefix that can be loaded; a miss if the answer breaks the contract.

        Args:
            request: Whose prompt.
            block_hashes: Of its full blocks.
            num_local_tokens: Tokens that the local prefix cache has.
            is_used: Whether a transfer id names a load or pinned blocks already.
        """

        def ask() -> Lookup:
            found = self._side.lookup(request, block_hashes=block_hashes, num_local_tokens=num_local_tokens)
            if not _are_whole(found.num_tokens, found.transfer_id) or found.num_tokens < 0:
                raise ContractError(
                    f"lookup gave {shown(found)}, whose num_tokens and transfer id must be whole numbers."
                )
            num_cached = found.num_cached_tokens
            if num_cached is not None and (not _are_whole(num_cached) or num_cached < 0):
                raise ContractError(
                    f"lookup gave num_cached_tokens = {shown(num_cached)}, which is no number of tokens."
                )
            if not isinstance(found.timeout_s, int | float) or math.isnan(found.timeout_s):
                raise ContractError(f"lookup gave timeout_s = {shown(found.timeout_s)}, which is no time.")
            if not found.pending and found.num_tokens and is_used(found.transfer_id):
                raise ContractError(f"lookup gave transfer id {found.transfer_id} a second time.")
            if not isinstance(found.first_token, FirstToken | None):
                raise ContractError(f"lookup gave {shown(found.first_token)}, which is no FirstToken.")
            return found

        return self._call("lookup", ask, Lookup())

    def on_allocated(self, transfer_id: int, *, blocks: Sequence[int], block_hashes: Sequence[bytes]) -> bool:
        """Forward the blocks to load into; False if it raised: the load must be given up."""

        def tell() -> bool:
            self._side.on_allocated(transfer_id, blocks=blocks, block_hashes=block_hashes)
            return True

        return self._call("on_allocated", tell, False)

    def on_layerwise(self, transfer_id: int) -> bool:
        """Forward that a step waits for a load layer by layer; False if it raised or is not supported."""

        def tell() -> bool:
            if not isinstance(self._side, SupportsLayerwise):
                return False
            self._side.on_layerwise(transfer_id)
            return True

        return self._call("on_layerwise", tell, False)

    def on_unused(self, transfer_id: int) -> None:
        """Forward that a hit is not loaded; also to a side that is off, which may be asked again."""
        self._call("on_unused", lambda: self._side.on_unused(transfer_id), None, always=True)

    def on_computed(self, *, blocks: Sequence[int], block_hashes: Sequence[bytes]) -> None:
        """Forward full blocks that may be saved."""
        self._call("on_computed", lambda: self._side.on_computed(blocks=blocks, block_hashes=block_hashes), None)

    def on_finished(self, request: Request, *, blocks: Sequence[int]) -> int | None:
        """Return a transfer id that pins the blocks, or None."""
        return self._call(
            "on_finished", lambda: _of_type(self._side.on_finished(request, blocks=blocks), int | None), None
        )

    def on_cancelled(self, transfer_id: int) -> None:
        """Forward that a load is given up; also to a side that is off, which must still release the blocks."""
        self._call("on_cancelled", lambda: self._side.on_cancelled(transfer_id), None, always=True)

    def on_failed(self, request: Request, failed: FailedLoad) -> bool:
        """Return whether a sequence whose load failed should be looked up again."""

        def ask() -> bool:
            answer = self._side.on_failed(request, failed)
            if answer not in {"compute", "retry"}:
                raise ContractError(f'on_failed returned {shown(answer)}; "compute" and "retry" are allowed.')
            return answer == "retry"

        return self._call("on_failed", ask, False)

    def take_message(self) -> bytes:
        """Return the message for the worker side."""
        return self._call("take_message", lambda: _of_type(self._side.take_message(), bytes), b"", always=True)

    def on_worker_message(self, rank: int, message: bytes) -> None:
        """Forward a message of a rank's worker side, if the side takes any."""
        side = self._side
        if isinstance(side, SupportsRemoteWorkers):
            self._call("on_worker_message", lambda: side.on_worker_message(rank, message), None, always=True)

    def on_report(self, report: ConnectorReport) -> None:
        """Forward a report."""
        self._call("on_report", lambda: self._side.on_report(report), None, always=True)

    def on_step(self, *, num_tokens: int, device_s: float) -> None:
        """Forward the tokens and the time of a step, if the side supports it."""
        side = self._side
        if isinstance(side, SupportsStepTimes):
            self._call("on_step", lambda: side.on_step(num_tokens=num_tokens, device_s=device_s), None)

    def metrics(self) -> str:
        """Return the connector's metrics; empty if it has none."""
        if not isinstance(self._side, SupportsMetrics):
            return ""
        text = self._guard.contained("metrics", self._side.metrics, "")
        if isinstance(text, str):
            return text
        self._guard.log_fault("metrics returned", f"metrics() returned {type(text).__name__}, which is no text.")
        return ""

    def close(self) -> None:
        """Close it; may be called twice."""
        self._guard.close()
        self._guard.contained("close", self._side.close, None)


def _are_whole(*numbers: object) -> bool:
    return all(isinstance(number, int | np.integer) for number in numbers)


def _of_type(answer: T, kind: Any) -> T:
    """Return an answer.

    Raises:
        ContractError: It is of another type.
    """
    if not isinstance(answer, kind):
        raise ContractError(f"it returned {shown(answer)}, where {getattr(kind, '__name__', kind)} is expected")
    return answer


def _all_of(answers: Iterable[T], kind: type[T]) -> tuple[T, ...]:
    """Return answers, at most 65,536 of them.

    Raises:
        ContractError: One is of another type.
    """
    return tuple([_of_type(answer, kind) for answer in islice(answers, _MAX_ANSWERS)])


class GuardedWorker(KVWorkerSide, SupportsRemoteScheduler):
    """Calls a worker side; after the start exceptions are caught. On the backend's thread.

    A call that raises has brought nothing: what it was to load is computed once the load times out.

    Args:
        side: The worker side.
        label: Names the component and its distribution in messages.
        meter: Measures the calls that do not wait; one that is too slow is warned about.
        remake: Makes the same in the process of a rank, to which it travels.
    """

    def __init__(
        self,
        side: KVWorkerSide,
        *,
        label: str = "the KV connector",
        meter: CallMeter | None = None,
        remake: Callable[[], KVWorkerSide] | None = None,
    ) -> None:
        self._remake = remake
        self._side = side
        self._label = label
        self._meter = meter or CallMeter(label, thread=ACTIVITY.device)
        self._faults = FaultLog(logger)

    def __reduce__(self) -> tuple[Callable[[], KVWorkerSide], tuple[()]]:
        if self._remake is None:
            raise TypeError(f"{self._label} cannot travel to another process")
        return self._remake, ()

    def register(self, kv_cache: KVPool) -> None:
        """Hand over the device's KV cache.

        Raises:
            PluginLoadError: It raised.
        """
        self._at_start("register", lambda: self._side.register(kv_cache))

    def on_ranks(self, layouts: Sequence[KVLayout], *, rank: int) -> None:
        """Forward what the ranks hold.

        Raises:
            PluginLoadError: It raised, or has no scheduler side in another process.
        """
        side = self._side
        if not isinstance(side, SupportsRemoteScheduler):
            raise PluginLoadError(
                f"{self._label} provides kv_connector.ranks, and its worker side has no on_ranks().",
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
                f"{self._label} raised {as_words(error)} in {name}().",
                hint="Mend it, or choose another in kv_connector.name.",
            ) from error

    def expect_layers(self) -> None:
        """Announce that blocks to be saved may be copied out during the step."""
        self._call("expect_layers", self._side.expect_layers, None)

    def begin_step(self, message: bytes) -> None:
        """Forward the scheduler side's message."""
        self._call("begin_step", lambda: self._side.begin_step(message), None)

    @property
    def wants_layers(self) -> bool:
        """Whether the current step has to wait for layers."""
        return self._call("wants_layers", lambda: bool(self._side.wants_layers), False)

    def wait_layer(self, layer: int, *, budget_s: float) -> bool:
        """Wait for a layer; False if the wait raised."""
        return self._call(
            "wait_layer", lambda: bool(self._side.wait_layer(layer, budget_s=budget_s)), False, waits=True
        )

    def end_step(self) -> None:
        """Forward the end of the step."""
        self._call("end_step", self._side.end_step, None)

    def poll(self) -> ConnectorReport:
        """Return the report; an empty one if the answer is not a report."""

        def poll() -> ConnectorReport:
            report = self._side.poll()
            numbers = [*_of_type(report, ConnectorReport).loaded, *report.released]
            for failed in report.failed:
                numbers += [_of_type(failed, FailedLoad).transfer_id, failed.num_valid_tokens]
            if not _are_whole(*numbers):
                raise ContractError(f"it returned {shown(report)}, whose transfer ids and tokens must be whole numbers")
            for message in report.messages:
                _of_type(message, bytes)
            return report

        return self._call("poll", poll, ConnectorReport())

    def close(self) -> None:
        """Close it."""
        self._call("close", self._side.close, None, waits=True)

    def _call(self, name: str, call: Callable[[], T], otherwise: T, *, waits: bool = False) -> T:
        meter = self._meter
        began_s = meter.begin()
        try:
            result = call()
        except BaseException as error:
            meter.end(began_s)
            reraise_interrupt(error)
            said = (
                f"{self._label} raised {as_words(error)} in {name}() of its worker side; the step goes on without it."
            )
            self._faults.say(f"{self._label}.{name}", said, error=error)
            return otherwise
        took_s = meter.end(began_s)
        if took_s > meter.budget_s and not waits and (slow := meter.overran(name, took_s)):
            self._faults.say(f"{self._label}.{name} is slow", f"{self._label} {slow}; steps wait for it.")
        return result
