"""Who asks: numbers, shares, and what of each tenant waits.

A tenant's name may have two parts, ``key/user``. What is configured for ``key`` holds for all its users together: they share its
weight, so that no client gets more under several user names, and its caps.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import numpy as np

from trencadis.clock import Clock
from trencadis.config.schema import DEFAULT_TENANT, TenantConfig
from trencadis.engine.sequences import SequenceTable
from trencadis.errors import InvalidRequestError
from trencadis.interfaces.restorable import Restorable
from trencadis.records import Request, evolve_unchecked

__all__ = ["FailureCosts", "Tenants"]

_MAX_COST_S = 10.0
_DECAY = 0.05
_MAX_COSTS = 1024


class FailureCosts(Restorable):
    """Work that requests of a tenant's key caused in vain, seconds; forgotten at a twentieth of the speed of time.

    So a tenant whose requests fail again and again takes no more than 5 % of the time of others, after the first ten seconds. Requests
    without a key are not charged: one client could lock out all the others.

    Args:
        clock: Of the engine.
    """

    restored = ("_costs",)

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._costs: dict[str, tuple[float, float]] = {}  # by key: cost, and when it was that

    def charge(self, tenant: str, cost_s: float) -> None:
        """Count what a request cost."""
        key = _key(tenant)
        if key and cost_s > 0:
            self._costs[key] = self._cost_s(key) + cost_s, self._clock.now_s()
            if len(self._costs) > _MAX_COSTS:
                self._costs = {name: entry for name, entry in self._costs.items() if self._cost_s(name) > 0}

    def retry_after_s(self, tenant: str) -> float:
        """Return when requests of a tenant that may cost something are taken again, seconds; 0: now. Pure."""
        return max(0.0, self._cost_s(_key(tenant)) - _MAX_COST_S) / _DECAY

    def _cost_s(self, key: str) -> float:
        cost_s, at_s = self._costs.get(key, (0.0, 0.0))
        return max(0.0, cost_s - _DECAY * (self._clock.now_s() - at_s))


@attrs.define
class _Account:
    """What the live sequences of one key add up to.

    Attributes:
        limits: As configured.
        users: By full name, the slots of live sequences that have the tenant's weight.
        num_live: Live sequences.
        num_waiting: Sequences that wait.
        num_waiting_tokens: Their tokens.
    """

    limits: TenantConfig
    users: dict[str, set[int]] = attrs.field(factory=dict)
    num_live: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0


class Tenants(Restorable):
    """Keeps the accounts of tenants that have live sequences. Every method is O(1) but for a change of a key's users.

    Args:
        clock: Of the engine.
        table: Its columns ``tenant`` and ``weight`` are set here.
        configured: By name; the entry ``default`` is that of all without one.

    Attributes:
        num_waiting_tokens: Tokens of all sequences that wait.
        failed_steps: What steps cost that failed because of one sequence.
        preparations: What it cost to prepare requests that were then refused.
    """

    restored = ("_numbers", "_waiting", "num_waiting_tokens")

    def __init__(self, clock: Clock, table: SequenceTable, configured: Mapping[str, TenantConfig]) -> None:
        self._table = table
        self._configured = configured
        self._default = configured.get(DEFAULT_TENANT, TenantConfig())
        self._numbers: dict[str, int] = {}
        self._accounts: dict[str, _Account] = {}
        self._account_of: dict[int, _Account] = {}
        self._waiting: dict[int, int] = {}  # tokens that a waiting slot was counted with
        self.num_waiting_tokens = 0
        self.failed_steps = FailureCosts(clock)
        self.preparations = FailureCosts(clock)

    def complete(self, request: Request) -> Request:
        """Return the request with what its tenant's entry says where it says nothing itself. Pure."""
        limits = self._limits(_key(request.tenant))
        if request.weight is not None and not limits.priority:
            return request
        weight = limits.weight if request.weight is None else request.weight
        if not limits.priority:
            return evolve_unchecked(request, weight=weight)
        return attrs.evolve(request, weight=weight, priority=request.priority + limits.priority)

    def key(self, tenant: str) -> str:
        """Return the part of a tenant's name for which limits are configured; empty: no key. Pure."""
        return _key(tenant)

    def waiting(self, tenant: str) -> tuple[int, int]:
        """Return how many sequences of a tenant wait, all users of its key together, and their tokens. Pure."""
        account = self._accounts.get(_key(tenant))
        return (account.num_waiting, account.num_waiting_tokens) if account else (0, 0)

    def refusal(self, request: Request) -> str:
        """Return why a new request may not wait, or an empty string. Pure.

        Raises:
            InvalidRequestError: It is longer than its tenant's cap, so it never could.
        """
        key, length = _key(request.tenant), len(request.prompt_token_ids)
        limits = self._limits(key)
        if not limits.max_waiting and not limits.max_waiting_tokens:
            return ""
        entry = f"[scheduling.tenants.{key if key in self._configured else DEFAULT_TENANT}]"
        num_waiting, num_tokens = self.waiting(request.tenant)
        if limits.max_waiting and num_waiting >= limits.max_waiting:
            return f"tenant {key!r} has {num_waiting} waiting and may have {limits.max_waiting} ({entry} max_waiting)"
        if not limits.max_waiting_tokens or num_tokens + length <= limits.max_waiting_tokens:
            return ""
        if length > limits.max_waiting_tokens:
            raise InvalidRequestError(
                f"request {request.request_id!r} has {length} prompt tokens: its tenant {key!r} may let "
                f"{limits.max_waiting_tokens} wait ({entry} max_waiting_tokens).",
                hint="Send a shorter prompt, or raise the cap.",
            )
        return (
            f"tenant {key!r} has {num_tokens} tokens waiting and may have {limits.max_waiting_tokens} "
            f"({entry} max_waiting_tokens); this prompt has {length}"
        )

    def enter(self, slot: int, request: Request, *, has_own_weight: bool = False) -> None:
        """Count a new sequence in.

        Args:
            slot: Its slot.
            request: Completed.
            has_own_weight: Its weight was asked for, so it is not shared with other users of the key.
        """
        key = _key(request.tenant)
        account = self._accounts.get(key)
        if account is None:
            account = self._accounts[key] = _Account(self._limits(key))
        account.num_live += 1
        self._account_of[slot] = account
        self._table.tenant[slot] = self._numbers.setdefault(request.tenant, len(self._numbers))
        self._table.weight[slot] = request.weight
        if not has_own_weight:
            slots = account.users.setdefault(request.tenant, set())
            slots.add(slot)
            self._share(account, slot, is_new_user=len(slots) == 1)

    def leave(self, slot: int, tenant: str) -> None:
        """Count a sequence out that no longer waits."""
        account = self._account_of.pop(slot)
        account.num_live -= 1
        if not account.num_live:
            del self._accounts[_key(tenant)]
            return
        slots = account.users.get(tenant)
        if slots is not None and slot in slots:
            slots.remove(slot)
            if not slots:
                del account.users[tenant]
                self._share_anew(account)

    def waits(self, slot: int) -> None:
        """Say that a sequence waits from now on."""
        num_tokens = self._waiting[slot] = int(self._table.num_tokens[slot])
        account = self._account_of[slot]
        account.num_waiting += 1
        account.num_waiting_tokens += num_tokens
        self.num_waiting_tokens += num_tokens

    def waits_no_more(self, slot: int) -> None:
        """Say that a sequence has been admitted, set aside or ended."""
        num_tokens = self._waiting.pop(slot)
        account = self._account_of[slot]
        account.num_waiting -= 1
        account.num_waiting_tokens -= num_tokens
        self.num_waiting_tokens -= num_tokens

    def _limits(self, key: str) -> TenantConfig:
        return self._configured.get(key, self._default)

    def _share(self, account: _Account, slot: int, *, is_new_user: bool) -> None:
        """Give a slot its share of the key's weight, and the others theirs if the users have become more."""
        if is_new_user and len(account.users) > 1:
            self._share_anew(account)
        else:
            self._table.weight[slot] = account.limits.weight / len(account.users)

    def _share_anew(self, account: _Account) -> None:
        if account.users:
            slots = np.fromiter((slot for slots in account.users.values() for slot in slots), np.int64)
            self._table.weight[slots] = account.limits.weight / len(account.users)


def _key(tenant: str) -> str:
    """Return the part of a tenant's name for which limits are configured. Pure."""
    return tenant.partition("/")[0]
