"""Suffix decoding: what most often followed the sequence's end, in the sequence itself and in its tenant's earlier outputs.

Source: Oliaro et al., SuffixDecoding, arXiv 2411.04975.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from trencadis.errors import ConfigValueError
from trencadis.interfaces import ComponentContext, DraftView, Speculator
from trencadis.records import Drafts, Int32Array, Request
from trencadis_plugins.speculation.by_sequence import BySequence
from trencadis_plugins.speculation.config import SuffixConfig
from trencadis_plugins.speculation.suffix_outputs import PastOutputs
from trencadis_plugins.speculation.suffix_search import NOTHING, Found, Search
from trencadis_plugins.speculation.suffix_tree import SuffixTree

__all__ = ["Suffix"]

_MOST_LEARNT = 2048
"""Tokens of one sequence that a call learns: a long prompt is learnt in several, for the others wait meanwhile."""


class _Own:
    """The text of one sequence.

    Args:
        key: Whose past outputs it may draft from.
        max_depth: Of its tree.
    """

    def __init__(self, key: Hashable, max_depth: int) -> None:
        self.key = key
        self.tree = SuffixTree(max_depth)


class Suffix(Speculator):
    """Drafts the most frequent continuation, as far as it is likely to be right.

    Args:
        config: Its table.
        context: Not used.

    Raises:
        ConfigValueError: The trees are not deeper than the drafts are long.
    """

    def __init__(self, config: SuffixConfig | None = None, context: ComponentContext | None = None) -> None:
        config = config or SuffixConfig()
        if config.max_depth <= config.max_draft_tokens:
            raise ConfigValueError(
                f"[speculation.suffix] max_depth = {config.max_depth}: it must be above max_draft_tokens = "
                f"{config.max_draft_tokens}, for a match and its drafts are so many tokens together."
            )
        self.max_draft_tokens = config.max_draft_tokens
        self.drafts_trees = config.tree
        self._search = Search(
            max_depth=config.max_depth, factor=config.factor, offset=config.offset, min_prob=config.min_prob
        )
        self._own: BySequence[_Own] = BySequence(self._new_own)
        self._past = PastOutputs(
            max_depth=config.max_depth, max_requests=config.max_cached_requests, max_tokens=config.max_cached_tokens
        )

    def propose(self, view: DraftView) -> Drafts:
        """Return at most ``max_draft_tokens`` drafts for each sequence."""
        slots, limits = view.slots.tolist(), view.max_draft_tokens.tolist()
        linear = view.linear_only.tolist()
        counts: list[int] = []
        flat: list[int] = []
        parents: list[int] = []
        for i, tokens in enumerate(view.token_ids):
            own = self._own_text(slots[i], view.requests[i], tokens)
            most = min(limits[i], self.max_draft_tokens)
            found = self._found(own, tokens, most, branch=self.drafts_trees and not linear[i]) if most else NOTHING
            counts.append(len(found.tokens))
            flat += found.tokens
            if self.drafts_trees:
                parents += found.parents or range(-1, len(found.tokens) - 1)
        return Drafts(
            num_drafts=np.array(counts, np.int32),
            token_ids=np.array(flat, np.int32),
            parents=np.array(parents, np.int32) if self.drafts_trees else None,
        )

    def on_finished(self, *, slot: int, token_ids: Int32Array) -> None:
        """Remember the output for the tenant's next requests."""
        own = self._own.drop(slot)
        if own is not None:
            self._past.add(own.key, token_ids.tolist())

    def close(self) -> None:
        """Forget all."""
        self._own.clear()
        self._past.clear()

    # ------------------------------------------------------------------------------------------------- innards

    def _new_own(self, request: Request) -> _Own:
        # Another adapter is another model: what it writes says little about this one's.
        return _Own((request.cache_salt, request.adapter), self._search.max_depth)

    def _own_text(self, slot: int, request: Request, tokens: Int32Array) -> _Own:
        own = self._own.get(slot, request)
        if own.tree.num_seen > len(tokens):
            own = self._own.renew(slot, request)
        seen = own.tree.num_seen
        own.tree.extend(tokens[seen : seen + _MOST_LEARNT].tolist())
        return own

    def _found(self, own: _Own, tokens: Int32Array, most: int, *, branch: bool) -> Found:
        """Return the better of what the sequence and the past outputs say; the sequence's own if they are equal."""
        last = tokens[-self._search.longest(most) :].tolist()
        found = self._search.find(own.tree, last, most, branch=branch)
        past = self._past.tree(own.key)
        if past is None:
            return found
        other = self._search.find(past, last, most, least=found.score, branch=branch)
        return other if other.tokens else found
