"""What each speculator has shown: accepted tokens per step, of a request and of its tenant's requests before it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

import attrs

__all__ = ["Evidence", "Record"]

_MAX_TENANTS = 1024
_TENANT_MEMORY = 8  # times that of a request
_AT_FIRST = 1.0  # accepted tokens of a member that nobody has asked: enough to be tried early


@attrs.define
class Record:
    """What one request or tenant knows of every member.

    Attributes:
        num_asked: Times each member was asked.
        weights: Steps that each member's total stands for; old ones count less.
        totals: Accepted tokens in these.
    """

    num_asked: list[int]
    weights: list[float]
    totals: list[float]

    @classmethod
    def empty(cls, num_members: int) -> Record:
        """Return a record of nothing."""
        return cls([0] * num_members, [0.0] * num_members, [0.0] * num_members)

    def note(self, member: int, num_accepted: float, memory: float) -> None:
        """Note a step; one ``memory`` steps ago counts a third of it (1 / e)."""
        kept = 1.0 - 1.0 / memory
        self.weights[member] = self.weights[member] * kept + 1.0
        self.totals[member] = self.totals[member] * kept + num_accepted

    def mean(self, member: int, prior: float, prior_weight: float) -> float:
        """Return accepted tokens per step, between what was seen and a prior that counts as so many steps. Pure."""
        weight = prior_weight + self.weights[member]
        return (prior * prior_weight + self.totals[member]) / weight if weight else prior


class Evidence:
    """Chooses a member for a request by what it has accepted. No clock, no random numbers: the same calls choose the same.

    Args:
        num_members: How many there are.
        explore_every: A request asks the member it has asked least once in so many steps; 0: never.
        prior_weight: What its tenant's requests have shown counts as so many steps.
        memory: Steps after which a step counts a third.
    """

    def __init__(self, num_members: int, *, explore_every: int, prior_weight: float, memory: int) -> None:
        self._num_members = num_members
        self._explore_every = explore_every
        self._prior_weight = prior_weight
        self._memory = memory
        self._tenants: OrderedDict[Hashable, Record] = OrderedDict()

    def choose(self, record: Record, tenant: Hashable) -> int:
        """Return the member to ask for a request, the first of equals."""
        asked, members = record.num_asked, range(self._num_members)
        if self._explore_every and sum(asked) % self._explore_every == self._explore_every - 1:
            chosen = min(members, key=asked.__getitem__)
        else:
            of_tenant = self._of(tenant)
            values = [
                record.mean(member, of_tenant.mean(member, _AT_FIRST, 1.0), self._prior_weight) for member in members
            ]
            chosen = values.index(max(values))
        asked[chosen] += 1
        return chosen

    def note(self, record: Record, tenant: Hashable, member: int, num_accepted: int) -> None:
        """Note what a member brought a request in a step; 0 if it drafted nothing."""
        record.note(member, num_accepted, self._memory)
        self._of(tenant).note(member, num_accepted, self._memory * _TENANT_MEMORY)

    def _of(self, tenant: Hashable) -> Record:
        found = self._tenants.get(tenant)
        if found is None:
            found = self._tenants[tenant] = Record.empty(self._num_members)
            if len(self._tenants) > _MAX_TENANTS:
                self._tenants.popitem(last=False)
        else:
            self._tenants.move_to_end(tenant)
        return found
