"""The guarded scheduling policy: any policy that takes over is told of every live request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from trencadis.engine.guard import Guarded
from trencadis.errors import ContractError
from trencadis.faults import Fallback, as_words, reraise_interrupt
from trencadis.interfaces import SchedulingPolicy, SupportsSteadySteps
from trencadis.interfaces.restorable import Restorable
from trencadis.records import BoolArray, Int64Array, Request

__all__ = ["GuardedScheduling"]


class GuardedScheduling(Guarded[SchedulingPolicy], SchedulingPolicy, Restorable):
    """A scheduling policy whose answers are legal. Another one may take its place at any time between two calls.

    A policy that takes over, a fallback included, is told of every live request, in the order of arrival.

    Args:
        label: See :class:`~trencadis.engine.guard.Guarded`.
        strategy: The chosen one.
        make_fallback: See :class:`~trencadis.engine.guard.Guarded`.
        options: See :class:`~trencadis.engine.guard.Guarded`.

    Attributes:
        name: Short name of the policy in force.
        live: Returns slot and request of all that are in the engine, in the order of arrival.
        quarantines: The last 16 policies that were quarantined, and why.
        runnable: Returns which running slots the next plan may have, of all of them, ``[n]``; None: all whose last token is not planned.
    """

    runnable: Callable[[Int64Array], BoolArray] | None = None

    def __init__(
        self,
        label: str,
        strategy: SchedulingPolicy,
        make_fallback: Callable[[], SchedulingPolicy] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            SchedulingPolicy, label, strategy, make_fallback, capabilities=(SupportsSteadySteps,), **options
        )
        self.name = label
        self.live: Callable[[], Iterable[tuple[int, Request]]] = tuple
        self.quarantines: deque[tuple[str, str]] = deque(maxlen=16)

    def replace(
        self, label: str, strategy: SchedulingPolicy, make_fallback: Callable[[], SchedulingPolicy] | None, *, name: str
    ) -> None:
        """Put another policy in place.

        Raises:
            ContractError: It raised when it was told of the live requests; nothing has changed.
        """
        try:
            self._introduce(strategy)
        except BaseException as error:
            reraise_interrupt(error)
            raise ContractError(
                f"{label} raised {as_words(error)} when it was told of the live requests.",
                hint="The policy that was in force still is.",
            ) from error
        if self._resting is not None:
            self._resting = None
            self._meter.switch_on()
        self._put(label)
        self.name = name
        self.strategy, self._make_fallback, self.is_replaced = strategy, make_fallback, False

    def _put_back(self, label: str, strategy: SchedulingPolicy, fallback: Fallback[SchedulingPolicy]) -> None:
        self.replace(label, strategy, fallback, name=self.name.removeprefix("fallback of "))

    def quarantine(self, cause: BaseException) -> None:
        """Put the fallback in place and tell it of the live requests."""
        self.quarantines.append((self.label, as_words(cause)))
        super().quarantine(cause)
        self.name = f"fallback of {self.name}"
        try:
            self._introduce(self.strategy)
        except BaseException as error:
            reraise_interrupt(error)
            self.quarantine(error)

    @property
    def preempts(self) -> bool:  # type: ignore[override] # as the policy in place says at the moment
        """Whether the policy preempts running sequences for waiting ones."""
        try:
            return bool(self.strategy.preempts)
        except BaseException as error:
            reraise_interrupt(error)
            self.quarantine(error)
            return self.preempts

    def _introduce(self, strategy: SchedulingPolicy) -> None:
        for slot, request in self.live():
            strategy.on_added(slot=slot, request=request)
