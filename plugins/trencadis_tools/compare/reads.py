"""Recording of the view columns and request fields that a scheduling policy reads while it decides."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trencadis.api import Registry
from trencadis.interfaces import ComponentContext, SchedulerView, SchedulingPolicy
from trencadis.records import Request

if TYPE_CHECKING:
    from trencadis.api import RegisteredComponent

__all__ = ["WatchedRegistry"]

_DECISIONS = (
    "admit",
    "admit_tenant",
    "on_added",
    "order",
    "split",
    "steady_steps",
    "chunk",
    "victim",
    "preempt_for",
)
"""Methods of a policy with the view or a request as argument."""


class WatchedRegistry(Registry):
    """Registry that records the reads of scheduling policies, and otherwise behaves as another registry.

    Args:
        registry: Registry to copy.

    Attributes:
        reads: Names of attributes that built policies have read so far.
    """

    def __init__(self, registry: Registry) -> None:
        vars(self).update(vars(registry))
        self.reads: set[str] = set()

    def build(self, registered: RegisteredComponent, config: Any, context: ComponentContext) -> Any:
        """Call a component's factory; reads of a scheduling policy are recorded from now on."""
        made = super().build(registered, config, context)
        if isinstance(made, SchedulingPolicy) and hasattr(made, "__dict__"):
            watch = _Watch(self.reads)
            for name in _DECISIONS:
                if getattr(type(made), name, None) is not getattr(SchedulingPolicy, name, None):
                    # Set on the object, not its class: the engine asks the class which methods a subclass overrides.
                    setattr(made, name, watch.watched(getattr(made, name)))
        return made


class _Watch:
    """Wraps methods so that views and requests among their arguments record which attributes are read.

    Args:
        reads: Set that receives the names of attributes.
    """

    def __init__(self, reads: set[str]) -> None:
        self._reads = reads
        self._kinds = {kind: self._noting(kind) for kind in (SchedulerView, Request)}

    def watched(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method wrapped with recording arguments."""

        def call(*args: Any, **kwargs: Any) -> Any:
            words = {name: self._copy(value) for name, value in kwargs.items()}
            return method(*map(self._copy, args), **words)

        return call

    def _copy(self, value: Any) -> Any:
        noting = self._kinds.get(type(value))
        if noting is None:
            return value
        copied = copy.copy(value)
        object.__setattr__(copied, "__class__", noting)
        return copied

    def _noting(self, kind: type[Any]) -> type[Any]:
        """Return a subclass that records the names of attributes that are read."""
        note = self._reads.add

        class Noting(kind):  # type: ignore[misc]
            __slots__ = ()

            def __getattribute__(self, name: str) -> Any:
                note(name)
                return super().__getattribute__(name)

        return Noting
