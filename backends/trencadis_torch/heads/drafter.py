"""A head beside a model: it follows every step, and drafts between two.

    step   ─▶ hidden states of its tokens ─▶ keys and values of the head's layer ─▶ the KV cache
    draft  ─▶ newest position of each sequence ─▶ attention over the cache ─▶ token ─▶ and so on; these keys stay out of the cache

Prefix hits, preemption, swaps and transfers move the head's keys and values with the model's. What a sequence lacks for a draft is the
hidden state of its newest position: without that there is none in this step.

Shapes: T tokens of a pass, B sequences, L positions, G most drafts of one, S hidden states side by side, H hidden size, N heads,
KV key-value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from trencadis.interfaces import HeadBatch
from trencadis.records import Int32Array, Pass
from trencadis_torch.attention.options import AttentionOptions
from trencadis_torch.attention.sdpa import attend
from trencadis_torch.cache.kv_cache import AttentionLayer, PagedKVCache
from trencadis_torch.cache.storage import decode
from trencadis_torch.device import to_device
from trencadis_torch.heads.loop import DraftLoop
from trencadis_torch.rows import Rows

__all__ = ["Attend", "Head", "HeadDrafter"]

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionOptions], torch.Tensor]
"""Attention's output ``[T, N, D]`` of queries, keys and values of one token of each sequence."""


class Head(Protocol):
    """What a head computes; keys and values at position i are those of hidden state i and token i + 1."""

    @property
    def layer(self) -> AttentionLayer:
        """Its layer of the KV cache."""
        ...

    @property
    def loop(self) -> DraftLoop | None:
        """Makes several drafts in one call; None: they are made one by one."""
        ...

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        """Return what the head reads, ``[T, H]``, from the model's hidden states ``[T, S]``."""
        ...

    def keys_and_values(
        self, hidden: torch.Tensor, next_ids: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values, ``[T, KV, D]`` each, of ``hidden`` ``[T, H]``, the tokens after them and their int64 positions, ``[T]``."""
        ...

    def draft(
        self, hidden: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the most likely tokens after ``tokens``, int64 ``[T]``, and what the head reads of these next, ``[T, H]``."""
        ...


class HeadDrafter:
    """Keys, values and newest hidden states of a head.

    Args:
        head: Computes.
        rows: Tokens and block tables.
        cache: The model's KV cache, which has a layer for the head.
    """

    def __init__(self, head: Head, *, rows: Rows, cache: PagedKVCache) -> None:
        self._head = head
        self._rows = rows
        self._cache = cache
        self._hidden: list[torch.Tensor] = []
        self._spans: dict[
            int, tuple[int, int, int, int]
        ] = {}  # of a row: which pass, first token there, position, tokens

    @property
    def layer_index(self) -> int:
        """Number of the head's layer in the cache."""
        return self._head.layer.index

    def begin_step(self) -> None:
        """Forget the hidden states of the step before."""
        self._hidden, self._spans = [], {}

    @torch.inference_mode()
    def follow(self, one: Pass, states: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Write keys and values of a pass's tokens, and keep their hidden states; the rows know the tokens after them.

        Args:
            one: The pass.
            states: Hidden states of the model, ``[T, S]``.
            positions: int64 ``[T]``.
            slots: Where keys and values go, int64 ``[T]``.
        """
        rows = to_device(np.repeat(one.rows, one.query_lens).astype(np.int64), positions.device)
        hidden = self._head.combine(states)
        keys, values = self._head.keys_and_values(hidden, self._tokens(rows, positions + 1), positions)
        self._cache.write(self._head.layer.index, slots, keys, values)
        firsts = np.cumsum(one.query_lens) - one.query_lens
        place = len(self._hidden)
        self._hidden.append(hidden)
        for row, first, start, size in zip(
            *(a.tolist() for a in (one.rows, firsts, one.starts, one.query_lens)), strict=True
        ):
            self._spans[row] = place, first, start, size

    @torch.inference_mode()
    def draft(self, batch: HeadBatch) -> Int32Array:
        """Return drafts; see ``SupportsHead``."""
        found = np.full((len(batch.rows), int(batch.num_drafts.max())), -1, np.int32)
        held = [self._held(*pair) for pair in zip(batch.rows.tolist(), batch.positions.tolist(), strict=True)]
        chosen = np.array([i for i, one in enumerate(held) if one is not None], np.int64)
        if not len(chosen):
            return found
        hidden = torch.stack([one for one in held if one is not None])
        rows, newest, counts = batch.rows[chosen], batch.positions[chosen], batch.num_drafts[chosen]
        most = int(counts.max())
        if self._head.loop is None:
            drafts = self._continued(hidden, rows, newest, most).cpu().numpy()
        else:
            drafts = self._in_one_call(self._head.loop, hidden, rows, newest, counts)
        found[chosen, :most] = np.where(np.arange(most) < counts[:, None], drafts, -1)
        return found

    # ------------------------------------------------------------------------------------------------- innards

    def _held(self, row: int, position: int) -> torch.Tensor | None:
        """Return the hidden state of a row's position, ``[H]``; None: the last step did not compute it."""
        place, first, start, size = self._spans.get(row, (0, 0, 0, 0))
        return self._hidden[place][first + position - start] if start <= position < start + size else None

    def _tokens(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        return self._rows.tokens[rows, columns].long()

    def _continued(self, hidden: torch.Tensor, rows: Int32Array, newest: Int32Array, most: int) -> torch.Tensor:
        """Return the most likely tokens, one after the other, int64 ``[B, most]``.

        Args:
            hidden: h of the newest positions, ``[B, H]``.
            rows: Row of each sequence.
            newest: Their newest positions.
            most: How many tokens.
        """
        row, position = to_device(np.stack([rows, newest]).astype(np.int64), hidden.device)
        context = _Context(*self._context(row, int(newest.max()) + 1, most, hidden.dtype), position, most)
        token, found = self._tokens(row, position + 1), []
        for _ in range(most):
            token, hidden = self._head.draft(hidden, token, position, context.attend)
            found.append(token)
            position = position + 1
        return torch.stack(found, 1)

    def _in_one_call(
        self, loop: DraftLoop, hidden: torch.Tensor, rows: Int32Array, newest: Int32Array, counts: Int32Array
    ) -> Int32Array:
        """Return the same drafts as :meth:`_continued`, int32 ``[B, most]``; what is beyond a sequence's number does not count."""
        row = torch.from_numpy(rows.astype(np.int64))
        tokens = self._tokens(row, torch.from_numpy(newest.astype(np.int64)) + 1)
        cached, tables = self._cache.layer(self._head.layer.index), self._rows.tables
        if cached[0].dtype is not torch.float32:
            # As if every text were one block.
            cached = self._context(row, int(newest.max()) + 1, 1, torch.float32)
            rows = np.arange(len(rows), dtype=np.int32)
            tables = torch.from_numpy(rows[:, None].copy())
        return loop.draft(hidden, tokens, newest, counts, cached=cached, tables=tables, rows=rows)

    def _context(
        self, row: torch.Tensor, length: int, most: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cached keys and values of rows, ``[B, length + most - 1, KV, D]`` each, with room behind them."""
        num_blocks = -(-length // self._cache.block_size)
        blocks = self._rows.tables[row, :num_blocks].long()
        # A shorter sequence's table names any block beyond its own: what is masked only has to be finite.
        parts = []
        for cached in self._cache.layer(self._head.layer.index):
            stored = cached[blocks.clamp(0, self._cache.num_blocks)].flatten(1, 2)[:, :length]
            part = decode(stored, dtype)
            parts.append(torch.cat([part, part.new_zeros(len(part), most - 1, *part.shape[2:])], 1))
        return parts[0], parts[1]


class _Context:
    """Keys and values that drafts attend to: those of the cache, then those of the drafts themselves, which are in no cache yet.

    Args:
        keys: From the cache, ``[B, length + most - 1, KV, D]``, with room behind them.
        values: As many.
        newest: Position of each sequence, int64 ``[B]``; up to there they count.
        most: Drafts of one.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, newest: torch.Tensor, most: int) -> None:
        self._keys, self._values = keys, values
        self._length, self._num_found = keys.shape[1] - most + 1, 0
        self._sees = (torch.arange(keys.shape[1], device=keys.device) <= newest[:, None])[:, None, None]

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Return attention's output of one token of each sequence, ``[B, N, D]``; the first one's keys and values are in the cache."""
        if self._num_found:
            place = self._length + self._num_found - 1
            self._keys[:, place], self._values[:, place] = keys, values
            self._sees[..., place] = True
        self._num_found += 1
        cached = self._keys.transpose(1, 2), self._values.transpose(1, 2)
        return attend(queries[:, :, None], *cached, mask=self._sees, options=options)[:, :, 0]
