"""Two policies that virtual token counters were compared with: least counter first, and a limit of requests a minute.

Source: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, section 5.1.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from trencadis.interfaces import ComponentContext, SchedulerView, SchedulingPolicy, TokenSplit
from trencadis.records import FloatArray, Int32Array, Request

__all__ = ["LeastCounterFirst", "RequestsPerMinute"]


class LeastCounterFirst(SchedulingPolicy):
    """The tenant that was served least since the start goes first. A tenant that was away has credit: nothing lifts its counter.

    Args:
        prompt_price: Of a prompt token.
        output_price: Of an output token.
    """

    def __init__(self, prompt_price: float = 1.0, output_price: float = 2.0) -> None:
        self._prices = prompt_price, output_price
        self._counters: FloatArray = np.zeros(16)  # by tenant
        self._paid: FloatArray = np.zeros(256)  # by slot

    def on_added(self, *, slot: int, request: Request) -> None:
        """Nothing of it is paid."""
        self._paid = _reaching(self._paid, slot)
        self._paid[slot] = 0.0

    def split(self, view: SchedulerView, *, token_budget: int) -> TokenSplit:
        """Charge what runs for what is new."""
        running, tenants = view.running, view.tenant[view.running]
        if running.size:
            self._paid = _reaching(self._paid, int(running.max()))
            self._counters = _reaching(self._counters, int(tenants.max()))
            prompt, (prompt_price, output_price) = view.num_prompt_tokens[running], self._prices
            due = prompt_price * prompt + output_price * (view.num_tokens[running] - prompt)
            np.add.at(self._counters, tenants, due - self._paid[running])
            self._paid[running] = due
        return super().split(view, token_budget=token_budget)

    def order(self, view: SchedulerView) -> Int32Array:
        """Return waiting slots by counter, each prompt charged before the next; those of a tenant as they wait."""
        by_tenant = np.argsort(view.tenant[view.waiting], kind="stable")
        slots = view.waiting[by_tenant]
        tenants = view.tenant[slots]
        self._paid = _reaching(self._paid, int(slots.max()))
        self._counters = _reaching(self._counters, int(tenants.max()))
        charges = np.maximum(self._prices[0] * view.num_prompt_tokens[slots] - self._paid[slots], 0)
        before = np.cumsum(charges) - charges
        before -= before[np.searchsorted(tenants, tenants)]  # of the tenant's own
        return slots[np.argsort(self._counters[tenants] + before, kind="stable")]


class RequestsPerMinute(SchedulingPolicy):
    """First come, first served; a tenant's requests beyond so many in a minute of the clock are refused.

    Args:
        per_minute: Requests.
        context: Has the clock.
    """

    def __init__(self, per_minute: int = 20, *, context: ComponentContext) -> None:
        self._per_minute, self._clock = per_minute, context.clock
        self._minute, self._counts = 0, Counter[str]()

    def admit_tenant(self, request: Request, *, num_waiting: int, num_waiting_tokens: int) -> str:
        """Count the request."""
        minute = int(self._clock.now_s() // 60)
        if minute != self._minute:
            self._minute, self._counts = minute, Counter()
        self._counts[request.tenant] += 1
        return (
            f"more than {self._per_minute} requests a minute" if self._counts[request.tenant] > self._per_minute else ""
        )


def _reaching(values: FloatArray, index: int) -> FloatArray:
    """Return the array, or a longer one with zeros at its end, that has an index. Pure."""
    return (
        values if index < len(values) else np.concatenate([values, np.zeros(max(len(values), index + 1 - len(values)))])
    )
