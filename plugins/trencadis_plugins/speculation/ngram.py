"""Prompt look-up: drafts the tokens that followed the last occurrence of the sequence's last few tokens.

hash of the last n tokens ─▶ heads: latest n-gram of that hash ─ links ─▶ the one before it ─▶ … ─▶ none

An n-gram is named by its end: the index of the token that follows it. Every hit is compared with the tokens themselves, so an
equal hash is never taken for an equal n-gram. It takes 8 to 24 bytes for each token and n: a tenth of a dictionary of tuples.
"""

from __future__ import annotations

from array import array

import numpy as np

from trencadis.errors import ConfigValueError
from trencadis.interfaces import ComponentContext, DraftView, Speculator
from trencadis.records import Drafts, Int32Array, Request
from trencadis_plugins.speculation.by_sequence import BySequence
from trencadis_plugins.speculation.config import NgramConfig

__all__ = ["Ngram", "NgramIndex"]


_BITS = 30
_MASK = (1 << _BITS) - 1
_SPREAD = 0x278DDE6D  # 2**30 / golden ratio. Source: Knuth, The Art of Computer Programming, vol. 3, section 6.4
_SMALLEST = 256
_FEW = 24  # new tokens up to which single look-ups are cheaper than array operations


class NgramIndex:
    """The n-grams of one sequence that grows.

    Args:
        min_size: Smallest n, at least 1.
        max_size: Largest n.
        earliest: Find the earliest occurrence, not the latest; its time grows with their number.
    """

    def __init__(self, min_size: int, max_size: int, *, earliest: bool = False) -> None:
        self._sizes = range(max_size, min_size - 1, -1)
        self._max_size = max_size
        self._earliest = earliest
        self.num_tokens = 0
        """Tokens it has seen."""
        self._codes: list[int] = []  # of the end when they were last looked at
        self._make_room(_SMALLEST)

    def find(self, tokens: Int32Array) -> int:
        """Return the index of the token that followed the longest known run that the sequence ends with, 0 if there is none.

        Args:
            tokens: All tokens of the sequence, those of the last call and what came since, int32 ``[num_tokens]``.
        """
        self._learn(tokens)
        last = tokens[-self._max_size :].tolist()
        codes = self._codes = _codes(last)
        shift, num_tokens = self._shift, len(tokens)
        for size, heads, links in self._tables:
            if size >= num_tokens:
                continue
            end, found = heads[codes[size] >> shift], 0
            while end:
                if tokens[end - size : end].tolist() == last[-size:]:
                    found = end
                    if not self._earliest:
                        break
                end = links[end]
            if found:
                return found
        return 0

    # ------------------------------------------------------------------------------------------------- innards

    def _learn(self, tokens: Int32Array) -> None:
        """Note the n-grams that something follows since the last call."""
        count = len(tokens)
        if count > self._capacity:
            self._make_room(count)
        first = self.num_tokens  # an n-gram that ended there had nothing after it the last time
        self.num_tokens = count
        if count - first > _FEW or not first:
            self._learn_many(tokens, max(first, 1), count)
        elif first < count:
            self._note(first, self._codes)
            widest = self._max_size
            for end in range(first + 1, count):
                self._note(end, _codes(tokens[max(end - widest, 0) : end].tolist()))

    def _note(self, end: int, codes: list[int]) -> None:
        shift = self._shift
        for size, heads, links in self._tables:
            if size <= end:
                bucket = codes[size] >> shift
                links[end] = heads[bucket]
                heads[bucket] = end

    def _learn_many(self, tokens: Int32Array, first: int, count: int) -> None:
        """The same as array operations: each n-gram is linked to the last one before it in its bucket."""
        words = tokens.astype(np.int64) + 1
        for size, its_heads, its_links in self._tables:
            start = max(first, size)
            if start >= count:
                continue
            codes = np.zeros(count - start, np.int64)
            for j in range(size):
                codes = ((codes + words[start - 1 - j : count - 1 - j]) * _SPREAD) & _MASK
            keys = np.sort(((codes >> self._shift) << 32) | np.arange(start, count))
            buckets, ends = keys >> 32, keys & 0xFFFFFFFF
            heads: Int32Array = np.frombuffer(its_heads, np.int32)
            links: Int32Array = np.frombuffer(its_links, np.int32)
            is_first = np.ones(len(ends), np.bool_)
            is_first[1:] = buckets[1:] != buckets[:-1]
            links[ends] = np.where(is_first, heads[buckets], np.roll(ends, 1))
            is_last = np.roll(is_first, -1)
            heads[buckets[is_last]] = ends[is_last]

    def _make_room(self, num_tokens: int) -> None:
        """Start again with room for more tokens; all is learnt anew, which costs constant time for each token in the long run."""
        bits = max(num_tokens + num_tokens // 2, _SMALLEST).bit_length()
        self._capacity, self._shift = 1 << bits, _BITS - bits
        self._tables = [(size, array("i", bytes(4 << bits)), array("i", bytes(4 << bits))) for size in self._sizes]
        self._codes = []
        self.num_tokens = 0


def _codes(last: list[int]) -> list[int]:
    """Return the hash of the last 0, 1, 2 … tokens, below ``2**30``. Pure."""
    found, code = [0], 0
    for token in reversed(last):
        code = ((code + token + 1) * _SPREAD) & _MASK
        found.append(code)
    return found


class Ngram(Speculator):
    """Drafts what followed the longest match of a sequence's end; the time does not grow with the sequence.

    Args:
        config: Table of the component.
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
