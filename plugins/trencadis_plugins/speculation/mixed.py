"""Several speculators, and for each request the one whose drafts have been accepted most.

request ─ evidence ─▶ member ─ drafts? ─ yes ─▶ verified ─▶ evidence
                        └────── no ──▶ next member
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from trencadis.errors import ConfigValueError
from trencadis.interfaces import ComponentContext, DraftView, Speculator
from trencadis.records import BucketLimits, Drafts, Int32Array, Request
from trencadis_plugins.speculation.by_sequence import BySequence
from trencadis_plugins.speculation.config import MixedConfig
from trencadis_plugins.speculation.mixed_drafts import merged, part_of
from trencadis_plugins.speculation.mixed_evidence import Evidence, Record

__all__ = ["Mixed"]


@attrs.define
class _Asked:
    """One sequence: its tenant's key, what its members have shown, and whose drafts are being verified (-1: nobody's)."""

    tenant: str
    record: Record
    drafted_by: int = -1


class Mixed(Speculator):
    """Asks one member for each sequence, and the next one if that has nothing to say. A member is called once per step at most.

    Args:
        config: Its table.
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
        """What its members keep on the device for each token, together, bytes."""
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
