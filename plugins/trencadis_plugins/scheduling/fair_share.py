"""Fair share: the tenant that used least, by weight, goes first."""

from __future__ import annotations

import numpy as np

from trencadis.interfaces import SchedulerView, SchedulingPolicy, SupportsSteadySteps, TokenSplit, plain_state
from trencadis.records import FloatArray, Int32Array, Int64Array, Request
from trencadis_plugins.scheduling.columns import SlotColumn
from trencadis_plugins.scheduling.config import FairShareConfig
from trencadis_plugins.scheduling.fcfs import Fcfs

__all__ = ["FairShare", "Wrapper"]


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


@plain_state
class FairShare(Wrapper, SupportsSteadySteps):
    """Virtual token counters: the tenant that used least, by its weight, is admitted next.

    A tenant pays for its prompt once it runs and for each output token; what a preempted sequence paid stays paid. A tenant that
    comes back is lifted to the least counter of those that wait: it gets no credit for the time that it was away. The order is
    what admitting one after the other would give, each admission charged before the next.

    While there has been one tenant only, every answer is the inner policy's and nothing is counted: counters matter by their
    differences, and a second tenant would be lifted to the first one's.

    Args:
        config: Prices.
        inner: Orders the requests of one tenant and does the rest; first come, first served if none.

    Source: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, algorithm 2 and section 4.2 (weights).
    """

    def __init__(self, config: FairShareConfig | None = None, inner: SchedulingPolicy | None = None) -> None:
        super().__init__(inner if inner is not None else Fcfs())
        config = config if config is not None else FairShareConfig()
        self._prompt_price, self._output_price = config.prompt_price, config.output_price
        self._counters = SlotColumn()  # by tenant
        self._paid, self._num_prompt, self._weight = SlotColumn(), SlotColumn(), SlotColumn()
        self._queued: Int64Array = np.empty(0, np.int64)
        self._last_tenant = -1
        self._is_shared = False  # more than one tenant has been seen
        self._is_settled = True  # what ran before that has been written off
        self._first_tenant: str | None = None

    def used(self, tenant: int) -> float:
        """Return a tenant's counter: what it used, by price and weight, lifts included."""
        return self._counters[tenant]

    def on_added(self, *, slot: int, request: Request) -> None:
        """Remember what a sequence costs that may end before it is seen running."""
        self._paid[slot], self._num_prompt[slot] = 0.0, len(request.prompt_token_ids)
        self._weight[slot] = request.weight or 1.0
        if not self._is_shared:
            if self._first_tenant is None:
                self._first_tenant = request.tenant
            elif request.tenant != self._first_tenant:
                self._is_shared, self._is_settled = True, False
        super().on_added(slot=slot, request=request)

    def split(self, view: SchedulerView, *, token_budget: int) -> TokenSplit:
        """Charge what runs, once there are several tenants; ask the inner policy."""
        if self._sees_several(view):
            if self._is_settled:
                self._charge(view)
            else:
                self._write_off(view)
        return super().split(view, token_budget=token_budget)

    def steady_steps(self, view: SchedulerView) -> int:
        """Return what the inner policy says: counters order only who waits, and the next call charges for all steps since the last."""
        return self.inner.steady_steps(view) if isinstance(self.inner, SupportsSteadySteps) else 1

    def order(self, view: SchedulerView) -> Int32Array:
        """Return waiting slots as tenants take turns; those of one tenant as the inner policy orders them."""
        waiting = super().order(view)
        if not self._sees_several(view):
            return waiting
        tenants = view.tenant[waiting]
        by_tenant = np.argsort(tenants, kind="stable")
        grouped = tenants[by_tenant]
        firsts = np.flatnonzero(np.append(True, grouped[1:] != grouped[:-1]))
        self._lift(grouped[firsts])
        slots = waiting[by_tenant]
        unpaid = np.maximum(self._prompt_price * view.num_prompt_tokens[slots] - self._paid.of(slots), 0)
        charges = unpaid / view.weight[slots]
        before = np.cumsum(charges) - charges  # of the tenant's own, once the first one's is taken off
        own = before - np.repeat(before[firsts], np.diff(np.append(firsts, len(slots))))
        order = slots[np.argsort(self._counters.of(grouped.astype(np.int32)) + own, kind="stable")]
        self._last_tenant = int(view.tenant[order[-1]])
        return order

    def on_finished(self, *, slot: int, tenant: int, num_output_tokens: int) -> None:
        """Settle the account: charge what was not seen, give back what was charged ahead."""
        if self._is_shared and self._is_settled and (self._paid[slot] or num_output_tokens):
            due = self._prompt_price * self._num_prompt[slot] + self._output_price * num_output_tokens
            self._counters[tenant] += (due - self._paid[slot]) / (self._weight[slot] or 1.0)
        self._paid[slot] = self._num_prompt[slot] = self._weight[slot] = 0.0
        super().on_finished(slot=slot, tenant=tenant, num_output_tokens=num_output_tokens)

    def _charge(self, view: SchedulerView) -> None:
        """Charge running sequences for what is new since they were last seen."""
        running = view.running
        if not running.size:
            return
        weights = view.weight[running]
        due = self._due(view, running)
        self._counters.add(view.tenant[running].astype(np.int32), (due - self._paid.of(running)) / weights)
        self._weight.set_all(running, weights)
        self._paid.set_all(running, due)

    def _write_off(self, view: SchedulerView) -> None:
        """Take for paid what ran, or ran before a preemption, while there was one tenant only."""
        preempted = view.waiting[view.num_preemptions[view.waiting] > 0]
        for slots in (view.running, preempted):
            self._paid.set_all(slots, self._due(view, slots))
        self._is_settled = True

    def _due(self, view: SchedulerView, slots: Int32Array) -> FloatArray:
        """Return what sequences cost so far, before weights."""
        prompt = view.num_prompt_tokens[slots]
        return self._prompt_price * prompt + self._output_price * (view.num_tokens[slots] - prompt)

    def _sees_several(self, view: SchedulerView) -> bool:
        """Return whether there has been more than one tenant."""
        if self._first_tenant is None and not self._is_shared:
            # A policy that takes over was not told of those that came before it; it looks once.
            tenants = view.tenant[np.concatenate([view.running, view.waiting])]
            if tenants.size:
                self._first_tenant = ""
                self._is_shared = bool((tenants != tenants[0]).any())
        return self._is_shared

    def _lift(self, queued: Int64Array) -> None:
        """Raise tenants that were not in the queue to the least of those that were, or to the last that left it."""
        stayed = np.isin(queued, self._queued, assume_unique=True)
        if stayed.any():
            floor = float(self._counters.of(queued[stayed].astype(np.int32)).min())
        else:
            floor = self._counters[self._last_tenant] if self._last_tenant >= 0 else 0.0
        new = queued[~stayed].astype(np.int32)
        self._counters.set_all(new, np.maximum(self._counters.of(new), floor))
        self._queued = queued
