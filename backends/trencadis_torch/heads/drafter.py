"""A head beside a model: it follows every step, and drafts between two.

    step   ─▶ hidden states of its tokens ─▶ keys and values of the head's layer ─▶ the KV cache
    draft  ─▶ newest position of each sequence ─▶ attention over the cache ─▶ token ─▶ and so on; these keys stay out of the cache

Prefix hits, preemption, swaps and transfers move the head's keys and values with the model's. What a sequence lacks for a draft is the
hidden state of its newest position: without that there is none in this step.

Shapes: T tokens of a pass, B sequences, L positions, G most drafts of one, KV key-value heads, D head dimension.
"""

from __future__ import annotations

import numpy as np
import torch

from trencadis.interfaces import HeadBatch
from trencadis.records import Int32Array, Pass
from trencadis_torch.attention.options import AttentionOptions
from trencadis_torch.attention.sdpa import attend
from trencadis_torch.cache.kv_cache import PagedKVCache
from trencadis_torch.cache.storage import decode
from trencadis_torch.device import to_device
from trencadis_torch.heads.eagle import Eagle
from trencadis_torch.rows import Rows

__all__ = ["HeadDrafter"]

_OPTIONS = AttentionOptions()


class HeadDrafter:
    """Keys, values and newest hidden states of a head.

    Args:
        head: Computes.
        rows: Tokens and block tables.
        cache: Of the model; it has a layer for the head.
    """

    def __init__(self, head: Eagle, *, rows: Rows, cache: PagedKVCache) -> None:
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
            states: Of the model, ``[T, S]``.
            positions: int64 ``[T]``.
            slots: Where keys and values go, int64 ``[T]``.
        """
        rows = to_device(np.repeat(one.rows, one.query_lens).astype(np.int64), positions.device)
        hidden = self._head.combine(states)
        x, _ = self._head.inputs(hidden, self._tokens(rows, positions + 1))
        _, keys, values = self._head.heads(x, positions)
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
        most = int(batch.num_drafts[chosen].max())
        drafts = self._continued(hidden, batch.rows[chosen], batch.positions[chosen], most).cpu().numpy()
        found[chosen, :most] = np.where(np.arange(most) < batch.num_drafts[chosen, None], drafts, -1)
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
            rows: Of the sequences.
            newest: Their newest positions.
            most: How many tokens.
        """
        device, head = hidden.device, self._head
        row, position = to_device(np.stack([rows, newest]).astype(np.int64), device)
        length = int(newest.max()) + 1
        keys, values = self._context(row, length, most, hidden.dtype)
        # Behind the longest context come the drafts' own keys and values, which no step has computed yet.
        sees = torch.zeros(len(row), 1, 1, length + most - 1, dtype=torch.bool, device=device)
        sees[:, 0, 0, :length] = torch.arange(length, device=device) <= position[:, None]
        token, found = self._tokens(row, position + 1), []
        for step in range(most):
            x, residual = head.inputs(hidden, token)
            queries, new_keys, new_values = head.heads(x, position)
            if step:
                keys[:, length + step - 1], values[:, length + step - 1] = new_keys, new_values
                sees[..., length + step - 1] = True
            attended = attend(
                queries[:, :, None],
                keys.transpose(1, 2),
                values.transpose(1, 2),
                mask=sees,
                options=_OPTIONS,
            )
            token, hidden = head.finish(attended[:, :, 0], residual)
            found.append(token)
            position = position + 1
        return torch.stack(found, 1)

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
