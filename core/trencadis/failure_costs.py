"""What requests of a tenant cost others in vain."""

from __future__ import annotations

from trencadis.clock import Clock

__all__ = ["FailureCosts", "tenant_key"]

_MAX_COST_S = 10.0
_DECAY = 0.05
_MAX_COSTS = 1024


def tenant_key(tenant: str) -> str:
    """Return the part of a tenant's name, ``key/user``, for which limits are configured; empty: no key. Pure."""
    return tenant.partition("/")[0]


class FailureCosts:
    """Work that requests of a tenant's key caused in vain, seconds; the account falls by 0.05 s each second.

    So a tenant whose requests fail again and again takes no more than 5 % of the time of others, after the first ten seconds. Requests
    without a key are not charged: one client could lock out all the others.

    Args:
        clock: Source of time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._costs: dict[str, tuple[float, float]] = {}  # by key: cost, and when it was that

    def charge(self, tenant: str, cost_s: float) -> None:
        """Count what a request cost."""
        key = tenant_key(tenant)
        if key and cost_s > 0:
            self._costs[key] = self._cost_s(key) + cost_s, self._clock.now_s()
            if len(self._costs) > _MAX_COSTS:
                self._costs = {name: entry for name, entry in self._costs.items() if self._cost_s(name) > 0}

    def retry_after_s(self, tenant: str) -> float:
        """Return when requests of a tenant that may cost something are taken again, seconds; 0: now. Pure."""
        return max(0.0, self._cost_s(tenant_key(tenant)) - _MAX_COST_S) / _DECAY

    def _cost_s(self, key: str) -> float:
        cost_s, at_s = self._costs.get(key, (0.0, 0.0))
        return max(0.0, cost_s - _DECAY * (self._clock.now_s() - at_s))
