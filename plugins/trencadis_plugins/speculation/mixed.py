"""Several speculators, and for each request the one whose drafts have been accepted most.

request ─ evidence ─▶ member ─ drafts? ─ yes ─▶ verified ─▶ evidence
                        └────── no ──▶ next member
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

import attrs
import numpy as np

from trencadis.errors import ConfigValueError
from trencadis.interfaces import ComponentContext, DraftView, Speculator
from trencadis.records import BucketLimits, DraftDistributions, Drafts, Int32Array, Request
from trencadis_plugins.speculation.by_sequence import BySequence
from trencadis_plugins.speculation.config import MixedConfig

__all__ = ["Evidence", "Mixed", "Record", "merged", "part_of"]


_MAX_TENANTS = 1024
_TENANT_MEMORY = 8  # times that of a request
_AT_FIRST = 1.0  # accepted tokens of a member that nobody has asked: enough to be tried early


@attrs.define
class Record:
    """Acceptance of every member for one request or tenant.

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
        prior_weight: Number of steps that the evidence of its tenant's requests counts as.
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


def part_of(view: DraftView, indices: Sequence[int], most: int) -> DraftView:
    """Return the view of some of its sequences, for a speculator of at most ``most`` drafts. Pure."""
    picks = np.array(indices, np.int64)
    return DraftView(
        slots=view.slots[picks],
        epochs=view.epochs[picks],
        token_ids=tuple(view.token_ids[i] for i in indices),
        max_draft_tokens=np.minimum(view.max_draft_tokens[picks], most).astype(np.int32),
        requests=tuple(view.requests[i] for i in indices),
        seeds=tuple(view.seeds[i] for i in indices),
        linear_only=view.linear_only[picks],
    )


def merged(parts: Sequence[Drafts], places: Int32Array, *, trees: bool) -> Drafts:
    """Return the drafts of several speculators as one record. Pure.

    Args:
        parts: Answer of each part.
        places: Where each sequence's drafts are among all of ``parts``, one after the other, int32 ``[num_sequences]``; -1: it has
            none.
        trees: Drafts may branch, so each has a parent.
    """
    counts: Int32Array = np.concatenate([part.num_drafts for part in parts] or [places[:0]])
    tokens: Int32Array = np.concatenate([part.token_ids for part in parts] or [places[:0]])
    if not len(tokens):
        empty = np.empty(0, np.int32)
        return Drafts(num_drafts=np.zeros(len(places), np.int32), token_ids=empty, parents=empty if trees else None)
    whole = Drafts(
        num_drafts=counts,
        token_ids=tokens,
        parents=np.concatenate([_parents(part) for part in parts]) if trees else None,
        distributions=_distributions(parts),
    )
    return whole.take(places, np.where(places >= 0, counts[places], 0).astype(np.int32))


def _parents(drafts: Drafts) -> Int32Array:
    if drafts.parents is not None:
        return drafts.parents
    counts = drafts.num_drafts
    first = np.repeat(np.cumsum(counts) - counts, counts)
    line: Int32Array = (np.arange(len(first)) - first - 1).astype(np.int32)
    return line


def _distributions(parts: Sequence[Drafts]) -> DraftDistributions | None:
    """Return the distributions of all drafts; certain ones among them have none."""
    known = [part.distributions for part in parts if part.distributions is not None]
    if not known:
        return None
    rows, num_rows = [], 0
    for part in parts:
        if part.distributions is None:
            rows.append(np.full(len(part.token_ids), -1, np.int32))
            continue
        own = part.distributions.rows
        rows.append(np.where(own >= 0, own + num_rows, -1).astype(np.int32))
        num_rows += len(part.distributions.probabilities)
    if len(known) == 1:
        return DraftDistributions(rows=np.concatenate(rows), probabilities=known[0].probabilities)
    import torch  # only speculators that have loaded it draw drafts by distributions

    return DraftDistributions(
        rows=np.concatenate(rows), probabilities=torch.cat([distributions.probabilities for distributions in known])
    )


@attrs.define
class _Asked:
    """One sequence: its tenant's key, what its members have shown, and whose drafts are being verified (-1: nobody's)."""

    tenant: str
    record: Record
    drafted_by: int = -1


class Mixed(Speculator):
    """Asks one member for each sequence, and the next one if that has nothing to say. A member is called once per step at most.

    Args:
        config: Table of the component.
        context: Makes the members.

    Raises:
        ConfigValueError: A member is named twice.
    """

    def __init__(self, config: MixedConfig, context: ComponentContext) -> None:
        names = config.members
        if len(set(names)) < len(names):
            raise ConfigValueError(f"[speculation.mixed] members = {list(names)}: a member is named twice.")
        self._members: list[Speculator] = [context.make("speculation", name) for name in names]
        self._evidence = Evidence(
            len(names),
            explore_every=config.explore_every,
            prior_weight=config.prior_weight,
            memory=config.memory,
        )
        self._asked: BySequence[_Asked] = BySequence(self._new)
        self.max_draft_tokens = max(member.max_draft_tokens for member in self._members)
        self.drafts_trees = any(member.drafts_trees for member in self._members)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that its members keep on the device for each token, together."""
        return sum(member.kv_bytes_per_token for member in self._members)

    def allocate(self, limits: BucketLimits) -> None:
        """Tell every member."""
        for member in self._members:
            member.allocate(limits)

    def propose(self, view: DraftView) -> Drafts:
        """Return each sequence's drafts of the member chosen for it."""
        asked = self._sequences(view)
        limits = view.max_draft_tokens.tolist()
        groups: list[list[int]] = [[] for _ in self._members]
        for i, one in enumerate(asked):
            if limits[i]:
                groups[self._evidence.choose(one.record, one.tenant)].append(i)
        places: Int32Array = np.full(len(asked), -1, np.int32)
        parts: list[Drafts] = []
        num_placed = 0
        left: list[int] = []
        for number, member in enumerate(self._members):
            indices = sorted(groups[number] + left)
            if not indices:
                continue
            drafts = member.propose(part_of(view, indices, member.max_draft_tokens))
            parts.append(drafts)
            places[indices] = np.arange(num_placed, num_placed + len(indices))
            num_placed += len(indices)
            left = self._note(asked, indices, drafts, number)
        return merged(parts, places, trees=self.drafts_trees)

    def on_verified(self, *, slots: Int32Array, num_drafts: Int32Array, num_accepted: Int32Array) -> None:
        """Tell each member of its own drafts, and note what they brought."""
        known = [self._asked.known(slot) for slot in slots.tolist()]
        authors = np.array([-1 if one is None else one.drafted_by for one in known])
        authors[num_drafts == 0] = -1
        for number, member in enumerate(self._members):
            own = authors == number
            if own.any():
                member.on_verified(slots=slots[own], num_drafts=num_drafts[own], num_accepted=num_accepted[own])
        for one, author, accepted in zip(known, authors.tolist(), num_accepted.tolist(), strict=True):
            if one is not None and author >= 0:
                one.drafted_by = -1
                self._evidence.note(one.record, one.tenant, author, accepted)

    def on_finished(self, *, slot: int, token_ids: Int32Array) -> None:
        """Forget the sequence, and let every member."""
        self._asked.drop(slot)
        for member in self._members:
            member.on_finished(slot=slot, token_ids=token_ids)

    def close(self) -> None:
        """Close every member."""
        self._asked.clear()
        for member in self._members:
            member.close()

    # ------------------------------------------------------------------------------------------------- innards

    def _new(self, request: Request) -> _Asked:
        return _Asked(request.cache_salt, Record.empty(len(self._members)))

    def _sequences(self, view: DraftView) -> list[_Asked]:
        return [
            self._asked.get(slot, request) for slot, request in zip(view.slots.tolist(), view.requests, strict=True)
        ]

    def _note(self, asked: Sequence[_Asked], indices: Sequence[int], drafts: Drafts, member: int) -> list[int]:
        """Note who drafted; returns the sequences that are left without drafts."""
        left = []
        for i, count in zip(indices, drafts.num_drafts.tolist(), strict=True):
            asked[i].drafted_by = member if count else -1
            if not count:
                self._evidence.note(asked[i].record, asked[i].tenant, member, 0)
                left.append(i)
        return left
