"""Drafts of a head while they grow: chains and trees, level by level.

A draft attends to the text in the cache, to the drafts that it follows and to itself. What drafts leave stays here; their blocks need
not exist.

Shapes: B sequences, L positions of texts, R drafts of one, n nodes of a level, W most of them of one sequence, H hidden size, N heads,
KV key-value heads, D head dimension, V draft vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn import functional

from trencadis_torch.attention.options import AttentionOptions
from trencadis_torch.attention.sdpa import attend
from trencadis_torch.device import to_device
from trencadis_torch.heads.contract import Head

__all__ = ["Growth"]


class Growth:
    """The drafts of some sequences.

    Args:
        head: Computes.
        keys: Cached keys, ``[B, L, KV, D]``.
        values: Cached values, ``[B, L, KV, D]``.
        newest: Newest position of each sequence, int64 ``[B]``; up to there keys count.
        room: Drafts of a sequence that are to be expected.
    """

    def __init__(
        self, head: Head, keys: torch.Tensor, values: torch.Tensor, newest: torch.Tensor, *, room: int = 0
    ) -> None:
        self._head, self._newest, self.device = head, newest, keys.device
        self._keys, self._values = keys, values
        self._length, self._room = keys.shape[1], 0
        size = len(newest)
        self._sees = torch.arange(self._length, device=self.device) <= newest[:, None]
        self._counts = np.zeros(size, np.int64)
        # Of the newest token, then of each draft: which drafts it attends to, how many precede it, what the head reads of it.
        self._follows = torch.zeros(size, 1, 0, dtype=torch.bool, device=self.device)
        self._depths = torch.zeros(size, 1, dtype=torch.int64, device=self.device)
        self._hidden = torch.zeros(size, 1, 0, device=self.device)
        self._reserve(room)

    def begin(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits after the newest tokens, ``[B, V]``; their keys and values are in the cache.

        Args:
            hidden: Input of the head at the newest positions, ``[B, H]``.
            tokens: The newest tokens, int64 ``[B]``.
        """
        everyone = np.arange(len(tokens))
        logits, made = self._head.draft(hidden, tokens, self._newest, self._attention(everyone, None))
        self._hidden = functional.pad(made[:, None], (0, 0, 0, self._room))
        return logits

    def add(self, owners: np.ndarray, tokens: torch.Tensor, parents: np.ndarray) -> torch.Tensor:
        """Return logits after new drafts, ``[n, V]``.

        Args:
            owners: Sequence of each, ``[n]``.
            tokens: int64 ``[n]``.
            parents: The draft of its sequence that each follows, counted as they were added, ``[n]``; -1: the newest token.
        """
        places = self._counts[owners] + _within(owners)
        np.add.at(self._counts, owners, 1)
        self._reserve(int(self._counts.max()))
        owner, place, parent = to_device(np.stack([owners, places, 1 + parents]).astype(np.int64), self.device)
        follows = self._follows[owner, parent]
        follows[torch.arange(len(owners), device=self.device), place] = True
        depths = self._depths[owner, parent] + 1
        self._follows[owner, 1 + place], self._depths[owner, 1 + place] = follows, depths
        attention = self._attention(owners, (owner, place, follows))
        logits, made = self._head.draft(self._hidden[owner, parent], tokens, self._newest[owner] + depths, attention)
        self._hidden[owner, 1 + place] = made
        return logits

    # ------------------------------------------------------------------------------------------------- innards

    def _attention(self, owners: np.ndarray, drafts: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None) -> Any:
        """Return attention of nodes; of drafts with their sequences, places and whom they follow."""
        within = _within(owners)
        width = int(within.max()) + 1
        owner, column = to_device(np.stack([owners, within]).astype(np.int64), self.device)

        def attention(
            queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions
        ) -> torch.Tensor:
            size = len(self._newest)
            mask = functional.pad(self._sees[:, None].repeat(1, width, 1), (0, self._room))
            if drafts is not None:
                mine, place, follows = drafts
                self._keys[mine, self._length + place], self._values[mine, self._length + place] = keys, values
                mask[mine, column, self._length :] = follows
            padded = queries.new_zeros(size, width, *queries.shape[1:])
            padded[owner, column] = queries
            cached = self._keys.transpose(1, 2), self._values.transpose(1, 2)
            return attend(padded.transpose(1, 2), *cached, mask=mask[:, None], options=options).transpose(1, 2)[
                owner, column
            ]

        return attention

    def _reserve(self, room: int) -> None:
        """Have room for so many drafts of each sequence."""
        more = room - self._room
        if more <= 0:
            return
        self._room = room
        self._keys, self._values = (functional.pad(one, (0, 0, 0, 0, 0, more)) for one in (self._keys, self._values))
        self._follows = functional.pad(self._follows, (0, more, 0, more))
        self._depths = functional.pad(self._depths, (0, more))
        self._hidden = functional.pad(self._hidden, (0, 0, 0, more))


def _within(owners: np.ndarray) -> np.ndarray:
    """Return how many nodes before each one are of the same sequence. Pure."""
    order = np.argsort(owners, kind="stable")
    ordered = owners[order]
    found = np.empty(len(owners), np.int64)
    found[order] = np.arange(len(owners)) - np.searchsorted(ordered, ordered)
    return found
