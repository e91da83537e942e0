"""Prompt look-up: what followed the last few tokens when they last occurred in the sequence."""

from __future__ import annotations

import numpy as np

from trencadis.errors import ConfigValueError
from trencadis.interfaces import ComponentContext, DraftView, Speculator
from trencadis.records import Drafts, Int32Array, Request
from trencadis_plugins.speculation.by_sequence import BySequence
from trencadis_plugins.speculation.config import NgramConfig
from trencadis_plugins.speculation.ngram_index import NgramIndex

__all__ = ["Ngram"]


class Ngram(Speculator):
    """Drafts what followed the longest match of a sequence's end; the time does not grow with the sequence.

    Args:
        config: Its table.
        context: Not used.

    Raises:
        ConfigValueError: The shortest run is longer than the longest.
    """

    def __init__(self, config: NgramConfig | None = None, context: ComponentContext | None = None) -> None:
        self._config = config = config or NgramConfig()
        if config.min_match > config.max_match:
            raise ConfigValueError(
                f"[speculation.ngram] min_match = {config.min_match}: it is above max_match = {config.max_match}."
            )
        self.max_draft_tokens = config.max_draft_tokens
        self._indexes: BySequence[NgramIndex] = BySequence(self._new_index)

    def propose(self, view: DraftView) -> Drafts:
        """Return at most ``max_draft_tokens`` drafts for each sequence."""
        slots, limits = view.slots.tolist(), view.max_draft_tokens.tolist()
        runs = [
            self._run(slots[i], request, tokens, min(limits[i], self.max_draft_tokens))
            for i, (request, tokens) in enumerate(zip(view.requests, view.token_ids, strict=True))
        ]
        counts: Int32Array = np.array([len(run) for run in runs], np.int32)
        return Drafts(num_drafts=counts, token_ids=np.concatenate(runs) if runs else np.empty(0, np.int32))

    def on_finished(self, *, slot: int, token_ids: Int32Array) -> None:
        """Forget the sequence."""
        self._indexes.drop(slot)

    def close(self) -> None:
        """Forget all."""
        self._indexes.clear()

    # ------------------------------------------------------------------------------------------------- innards

    def _new_index(self, request: Request) -> NgramIndex:
        config = self._config
        return NgramIndex(config.min_match, config.max_match, earliest=config.occurrence == "earliest")

    def _run(self, slot: int, request: Request, tokens: Int32Array, most: int) -> Int32Array:
        index = self._indexes.get(slot, request)
        if index.num_tokens > len(tokens):
            index = self._indexes.renew(slot, request)
        start = index.find(tokens)
        if not start:
            return tokens[:0]
        run: Int32Array = tokens[start : start + most]
        if len(run) < most and self._config.continue_period:
            # The match overlaps the end, so the text has repeated itself: it goes on repeating.
            return np.resize(run, most)
        return run
