"""A head beside a model: it follows every step, and drafts between two.

    step   ─▶ hidden states of its tokens ─▶ keys and values of the head's layer ─▶ the KV cache
    draft  ─▶ newest position of each sequence ─▶ attention over the cache ─▶ token ─▶ and so on; these keys stay out of the cache

Prefix hits, preemption, swaps and transfers move the head's keys and values with the model's. What a sequence lacks for a draft is the
hidden state of its newest position: without that there is none in this step.

Shapes: T tokens of a pass, B sequences, L positions, G most drafts of one, S hidden states side by side, H hidden size, N heads,
KV key-value heads, D head dimension.
"""

from __future__ import annotations

import numpy as np
import torch

from trencadis.interfaces import HeadBatch, HeadGuesses, HeadNodes
from trencadis.records import Int32Array, Int64Array, Pass
from trencadis_torch.cache.kv_cache import PagedKVCache
from trencadis_torch.cache.storage import decode
from trencadis_torch.device import to_device
from trencadis_torch.heads.contract import Head
from trencadis_torch.heads.growth import Growth
from trencadis_torch.heads.loop import DraftLoop
from trencadis_torch.rows import Rows

__all__ = ["HeadDrafter"]


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
        self._growth: Growth | None = None
        self._places: Int64Array = np.empty(0, np.int64)
        self._spans: dict[
            int, tuple[int, int, int, int]
        ] = {}  # of a row: which pass, first token there, position, tokens

    @property
    def layer_index(self) -> int:
        """Number of the head's layer in the cache."""
        return self._head.layer.index

    def begin_step(self) -> None:
        """Forget the hidden states of the step before."""
        self._hidden, self._spans, self._growth = [], {}, None

    @torch.inference_mode()
    def follow(self, one: Pass, states: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Write keys and values of a pass's tokens, and keep their hidden states; the rows know the tokens after them.

        Args:
            one: The pass.
            states: Hidden states of the model, ``[T, S]``.
            positions: int64 ``[T]``.
            slots: Where keys and values go, int64 ``[T]``.
        """
        owners, cached = np.repeat(one.rows, one.query_lens), self._cache.layer(self._head.layer.index)
        if self._head.loop is not None and cached[0].dtype is torch.float32:
            following = self._rows.tokens.numpy()[owners, positions.numpy() + 1]
            hidden = self._head.loop.follow(states, following, positions, slots, cached=cached)
        else:
            rows = to_device(owners.astype(np.int64), positions.device)
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
        chosen, hidden = self._at_hand(batch.rows, batch.positions)
        if hidden is None:
            return found
        rows, newest, counts = batch.rows[chosen], batch.positions[chosen], batch.num_drafts[chosen]
        most = int(counts.max())
        if self._head.loop is None:
            drafts = self._continued(hidden, rows, newest, most, batch.min_probability).cpu().numpy()
        else:
            drafts = self._in_one_call(self._head.loop, hidden, rows, newest, counts, batch.min_probability)
        found[chosen, :most] = np.where(np.arange(most) < counts[:, None], drafts, -1)
        return found

    @torch.inference_mode()
    def rank(self, nodes: HeadNodes) -> HeadGuesses:
        """Return the most likely tokens after nodes of trees; see ``SupportsHead``."""
        growth = self._growth
        if growth is not None and len(nodes.owners):
            places = self._places[nodes.owners]
            logits = growth.add(places, to_device(nodes.token_ids.astype(np.int64), growth.device), nodes.parents)
            return self._ranked(logits, np.arange(len(places)), nodes.num_ranked, len(places))
        chosen, hidden = self._at_hand(nodes.rows, nodes.positions)
        self._places = np.full(len(nodes.rows), -1)
        self._places[chosen] = np.arange(len(chosen))
        if hidden is None:
            return self._ranked(torch.empty(0, nodes.num_ranked), chosen, nodes.num_ranked, len(nodes.rows))
        self._growth, logits = self._begun(hidden, nodes.rows[chosen], nodes.positions[chosen], room=0)
        return self._ranked(logits, chosen, nodes.num_ranked, len(nodes.rows))

    # ------------------------------------------------------------------------------------------------- innards

    def _ranked(self, logits: torch.Tensor, chosen: Int64Array, count: int, size: int) -> HeadGuesses:
        """Return the likeliest tokens, best first, of so many nodes, of which the chosen have logits."""
        top = logits.float().log_softmax(-1).topk(min(count, logits.shape[-1]), dim=-1)
        ids, logprobs = np.full((size, count), -1, np.int32), np.full((size, count), -np.inf, np.float32)
        width = top.indices.shape[-1]
        ids[chosen, :width] = self._targets(top.indices).cpu().numpy()
        logprobs[chosen, :width] = top.values.cpu().numpy()
        return HeadGuesses(token_ids=ids, logprobs=logprobs)

    def _at_hand(self, rows: Int32Array, positions: Int32Array) -> tuple[Int64Array, torch.Tensor | None]:
        """Return the sequences whose newest hidden state is kept, and these states, ``[B, H]``; None: no one's is."""
        held = [self._held(*pair) for pair in zip(rows.tolist(), positions.tolist(), strict=True)]
        chosen = np.array([i for i, one in enumerate(held) if one is not None], np.int64)
        return chosen, torch.stack([one for one in held if one is not None]) if len(chosen) else None

    def _held(self, row: int, position: int) -> torch.Tensor | None:
        """Return the hidden state of a row's position, ``[H]``; None: the last step did not compute it."""
        place, first, start, size = self._spans.get(row, (0, 0, 0, 0))
        return self._hidden[place][first + position - start] if start <= position < start + size else None

    def _tokens(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        return self._rows.tokens[rows, columns].long()

    def _continued(
        self, hidden: torch.Tensor, rows: Int32Array, newest: Int32Array, most: int, min_probability: float
    ) -> torch.Tensor:
        """Return the most likely tokens, one after the other, int64 ``[B, most]``; -1 from the first that is too unlikely.

        Args:
            hidden: h of the newest positions, ``[B, H]``.
            rows: Row of each sequence.
            newest: Their newest positions.
            most: How many tokens.
            min_probability: Least probability of a token.
        """
        growth, logits = self._begun(hidden, rows, newest, room=most - 1)
        everyone, found, chances = np.arange(len(rows)), list[torch.Tensor](), list[torch.Tensor]()
        for step in range(most):
            if step:
                logits = growth.add(everyone, found[-1], np.full(len(rows), step - 2))
            top = logits.max(-1)
            found.append(self._targets(top.indices))
            if min_probability:
                chances.append((top.values.float() - logits.float().logsumexp(-1)).exp())
        tokens = torch.stack(found, 1)
        return tokens.where((torch.stack(chances, 1) >= min_probability).cummin(1).values, -1) if chances else tokens

    def _begun(
        self, hidden: torch.Tensor, rows: Int32Array, newest: Int32Array, *, room: int
    ) -> tuple[Growth, torch.Tensor]:
        """Return drafts that are to grow after the newest tokens, and the logits after these."""
        row, position = to_device(np.stack([rows, newest]).astype(np.int64), hidden.device)
        keys, values = self._context(row, int(newest.max()) + 1, hidden.dtype)
        growth = Growth(self._head, keys, values, position, room=room)
        return growth, growth.begin(hidden, self._tokens(row, position + 1))

    def _targets(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the model's tokens of draft tokens."""
        table = self._head.target_ids
        return ids if table is None else table[ids]

    def _in_one_call(
        self,
        loop: DraftLoop,
        hidden: torch.Tensor,
        rows: Int32Array,
        newest: Int32Array,
        counts: Int32Array,
        min_probability: float,
    ) -> Int32Array:
        """Return the same drafts as :meth:`_continued`, int32 ``[B, most]``; what is beyond a sequence's number does not count."""
        tokens = self._rows.tokens.numpy()[rows, newest + 1]
        cached, tables = self._cache.layer(self._head.layer.index), self._rows.tables
        if cached[0].dtype is not torch.float32:
            # As if every text were one block.
            cached = self._context(torch.from_numpy(rows.astype(np.int64)), int(newest.max()) + 1, torch.float32)
            rows = np.arange(len(rows), dtype=np.int32)
            tables = torch.from_numpy(rows[:, None].copy())
        return loop.draft(
            hidden, tokens, newest, counts, cached=cached, tables=tables, rows=rows, min_probability=min_probability
        )

    def _context(self, row: torch.Tensor, length: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cached keys and values of rows, ``[B, length, KV, D]`` each."""
        num_blocks = -(-length // self._cache.block_size)
        blocks = self._rows.tables[row, :num_blocks].long()
        # A shorter sequence's table names any block beyond its own: what is masked only has to be finite.
        parts = [
            decode(cached[blocks.clamp(0, self._cache.num_blocks)].flatten(1, 2)[:, :length], dtype)
            for cached in self._cache.layer(self._head.layer.index)
        ]
        return parts[0], parts[1]
