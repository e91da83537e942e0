"""Who asks: numbers, shares, and what of each tenant waits.

A tenant's name may have two parts, ``key/user``. What is configured for ``key`` holds for all its users together: they share its
weight, so that no client gets more under several user names, and its caps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from trencadis.config.schema import DEFAULT_TENANT, TenantConfig
from trencadis.engine.sequences import Claim, Leaving, Sequence
from trencadis.engine.stage import EngineParts, Stage
from trencadis.errors import InvalidRequestError, RequestRefusedError
from trencadis.failure_costs import FailureCosts, tenant_key
from trencadis.interfaces.restorable import Restorable
from trencadis.records import Request, evolve_unchecked

__all__ = ["Tenants"]


@attrs.define
class _Account:
    """What the live sequences of one key add up to.

    Attributes:
        limits: The configured limits.
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


class Tenants(Stage, Restorable):
    """Keeps the accounts of tenants that have live sequences. Every method is O(1) but for a change of a key's users."""

    restored = ("_numbers",)

    def bind(self, engine: EngineParts) -> None:
        """Set the columns ``tenant`` and ``weight`` of sequences, and count those that wait, from now on."""
        self._state, self._table = engine.state, engine.state.table
        self._configured: Mapping[str, TenantConfig] = engine.config.scheduling.tenants
        self._default = self._configured.get(DEFAULT_TENANT, TenantConfig())
        self._numbers: dict[str, int] = {}
        self._accounts: dict[str, _Account] = {}
        self._failed_steps = FailureCosts(engine.state.clock)
        engine.state.on_waiting.append(self._waits)
        engine.state.waiting_of = self.waiting_of

    def accept(self, request: Request) -> Request:
        """Return the request with what its tenant's entry says where it says nothing itself.

        Raises:
            RequestRefusedError: A cap of the tenant is reached, or its requests failed steps again and again.
            InvalidRequestError: It is longer than its tenant's cap, so it never could wait.
        """
        if request.output_token_ids is None:  # else another engine has accepted it
            retry_after_s = self._failed_steps.retry_after_s(request.tenant)
            if retry_after_s:
                raise RequestRefusedError(
                    f"request {request.request_id!r} was refused: steps failed again and again because of requests of tenant "
                    f"{tenant_key(request.tenant)!r}, and others' were computed anew.",
                    hint=f"Send it again after {retry_after_s:.0f} s, and leave out what fails.",
                    retry_after_s=retry_after_s,
                )
            if refusal := self._refusal(request):
                raise RequestRefusedError(f"request {request.request_id!r} was refused: {refusal}.")
        return self._completed(request)

    def added(self, sequence: Sequence) -> str:
        """Count a new sequence in."""
        request, slot = sequence.request, sequence.slot
        self._table.tenant[slot] = self._numbers.setdefault(request.tenant, len(self._numbers))
        self._table.weight[slot] = request.weight
        self._enter(sequence)
        return ""

    def leaving(self, sequence: Sequence, leaving: Leaving) -> Claim | None:
        """Count a sequence out that ends, and what it cost others."""
        if leaving.reason is None:
            return None
        request, slot = sequence.request, sequence.slot
        self._failed_steps.charge(request.tenant, leaving.cost_s)
        account = self._account(request.tenant)
        account.num_live -= 1
        slots = account.users.get(request.tenant, set())
        if slot in slots:
            slots.remove(slot)
            if not slots:
                del account.users[request.tenant]
                self._share_anew(account)
        self._forget_empty(account, request.tenant)
        return None

    def waiting_of(self, request: Request) -> tuple[int, int]:
        """Return how many sequences of a request's tenant wait, all users of its key together, and their tokens. Pure."""
        account = self._accounts.get(tenant_key(request.tenant))
        return (account.num_waiting, account.num_waiting_tokens) if account else (0, 0)

    def restore_state(self, values: Mapping[str, Any]) -> None:
        """Take the numbers of tenants, and count the sequences in that were restored with their columns."""
        super().restore_state(values)
        for slot in self._state.slot_of.values():
            sequence = self._table.sequence(slot)
            sequence.request = self._completed(sequence.original_request)
            self._enter(sequence)

    def _completed(self, request: Request) -> Request:
        limits = self._limits(tenant_key(request.tenant))
        if request.weight is not None and not limits.priority:
            return request
        weight = limits.weight if request.weight is None else request.weight
        if not limits.priority:
            return evolve_unchecked(request, weight=weight)
        return attrs.evolve(request, weight=weight, priority=request.priority + limits.priority)

    def _refusal(self, request: Request) -> str:
        """Return why a new request may not wait, or an empty string. Pure.

        Raises:
            InvalidRequestError: It is longer than its tenant's cap, so it never could.
        """
        key, length = tenant_key(request.tenant), len(request.prompt_token_ids)
        limits = self._limits(key)
        if not limits.max_waiting and not limits.max_waiting_tokens:
            return ""
        entry = f"[scheduling.tenants.{key if key in self._configured else DEFAULT_TENANT}]"
        num_waiting, num_tokens = self.waiting_of(request)
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

    def _waits(self, slot: int, num_tokens: int) -> None:
        """Count a sequence that waits from now on, or, if ``num_tokens`` is negative, no more."""
        tenant = self._table.sequence(slot).request.tenant
        account = self._account(tenant)
        account.num_waiting += 1 if num_tokens > 0 else -1
        account.num_waiting_tokens += num_tokens
        self._forget_empty(account, tenant)

    def _account(self, tenant: str) -> _Account:
        key = tenant_key(tenant)
        account = self._accounts.get(key)
        if account is None:
            account = self._accounts[key] = _Account(self._limits(key))
        return account

    def _forget_empty(self, account: _Account, tenant: str) -> None:
        if not account.num_live and not account.num_waiting:
            del self._accounts[tenant_key(tenant)]

    def _limits(self, key: str) -> TenantConfig:
        return self._configured.get(key, self._default)

    def _enter(self, sequence: Sequence) -> None:
        """Count a sequence in; one that brought no weight of its own gets its share of the key's weight."""
        tenant, slot = sequence.request.tenant, sequence.slot
        account = self._account(tenant)
        account.num_live += 1
        if sequence.original_request.weight is not None:
            return
        slots = account.users.setdefault(tenant, set())
        slots.add(slot)
        if len(slots) == 1 < len(account.users):
            self._share_anew(account)
        else:
            self._table.weight[slot] = account.limits.weight / len(account.users)

    def _share_anew(self, account: _Account) -> None:
        """Give all slots their share: the users of the key have become more, or fewer."""
        if account.users:
            slots = np.fromiter((slot for slots in account.users.values() for slot in slots), np.int64)
            self._table.weight[slots] = account.limits.weight / len(account.users)
