"""A policy around another one."""

from __future__ import annotations

from trencadis.interfaces import SchedulerView, SchedulingPolicy, TokenSplit
from trencadis.records import Int32Array, Request

__all__ = ["Wrapper"]


class Wrapper(SchedulingPolicy):
    """Does what the inner policy does; a subclass overrides what it does otherwise.

    Running sequences do not give way, whatever the inner policy says: whom it would prefer may be whom the wrapper does not.

    Args:
        inner: The inner policy.
    """

    def __init__(self, inner: SchedulingPolicy) -> None:
        self.inner = inner

    def admit(self, request: Request, *, num_waiting: int, num_waiting_tokens: int) -> str:
        """Ask the inner policy."""
        return self.inner.admit(request, num_waiting=num_waiting, num_waiting_tokens=num_waiting_tokens)

    def admit_tenant(self, request: Request, *, num_waiting: int, num_waiting_tokens: int) -> str:
        """Ask the inner policy."""
        return self.inner.admit_tenant(request, num_waiting=num_waiting, num_waiting_tokens=num_waiting_tokens)

    def on_added(self, *, slot: int, request: Request) -> None:
        """Tell the inner policy."""
        self.inner.on_added(slot=slot, request=request)

    def order(self, view: SchedulerView) -> Int32Array:
        """Ask the inner policy."""
        return self.inner.order(view)

    def split(self, view: SchedulerView, *, token_budget: int) -> TokenSplit:
        """Ask the inner policy."""
        return self.inner.split(view, token_budget=token_budget)

    def chunk(self, view: SchedulerView, *, slot: int, num_remaining: int, token_budget: int) -> int:
        """Ask the inner policy."""
        return self.inner.chunk(view, slot=slot, num_remaining=num_remaining, token_budget=token_budget)

    def victim(self, view: SchedulerView, *, candidates: Int32Array) -> int:
        """Ask the inner policy."""
        return self.inner.victim(view, candidates=candidates)

    def on_finished(self, *, slot: int, tenant: int, num_output_tokens: int) -> None:
        """Tell the inner policy."""
        self.inner.on_finished(slot=slot, tenant=tenant, num_output_tokens=num_output_tokens)
