"""Mirostat 2.0: truncates by a feedback loop that keeps the text's surprise near a target.

Shapes: R rows, V vocabulary, W positions whose state is kept.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trencadis.interfaces import SamplingContext
from trencadis.records import RowStart
from trencadis_plugins.sampling.row_processor import RowProcessor, on_device, select

__all__ = ["NUM_KEPT_POSITIONS", "Mirostat"]

NUM_KEPT_POSITIONS = 128
"""More than drafts and steps under way can take back."""


class Mirostat(RowProcessor):
    """Keeps tokens of surprise -log2 p <= mu, and the most likely ones; then mu -= eta (S - tau).

    S is the surprise of the chosen token under the distribution that is left; mu begins at 2 tau. mu is kept by position: a token
    that is taken back takes its mu with it, and the rows of drafts see the mu that their drafts lead to.

    Source: Basu et al., "Mirostat: a neural text decoding algorithm that directly controls perplexity", 2021, with the
    second algorithm of the authors' code.
    """

    honours = frozenset({"mirostat"})
    argmax_invariant = True
    needs_history = True
    """Tokens after the first position of a call are drafts, and mu moves with them."""

    has_state = True
    example = ("mirostat_mode", 2)

    def allocate(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Make room for ``num_rows`` sequences."""
        super().allocate(num_rows=num_rows, vocab_size=vocab_size, device=device)
        self._tau = np.ones(num_rows, dtype=np.float64)
        self._eta = np.zeros(num_rows, dtype=np.float64)
        self._held = np.full((num_rows, NUM_KEPT_POSITIONS), -1, dtype=np.int64)  # which position each mu is for
        self._mu = np.zeros((num_rows, NUM_KEPT_POSITIONS), dtype=np.float64)

    def applies_to(self, start: RowStart) -> bool:
        """Return whether Mirostat is on. Pure."""
        return start.params.mirostat_mode == 2 and not start.params.is_greedy

    def start_row(self, start: RowStart) -> None:
        """Set the parameters of a sequence and its initial mu."""
        super().start_row(start)
        self._held[start.row] = -1

    def _take(self, start: RowStart) -> None:
        self._tau[start.row], self._eta[start.row] = start.params.mirostat_tau, start.params.mirostat_eta

    def snapshot(self, row: int) -> Any:
        """Return a copy of a row's mu by position."""
        return self._held[row].copy(), self._mu[row].copy()

    def restore(self, row: int, state: Any) -> None:
        """Restore a row's mu from ``snapshot``."""
        held, mu = state
        self._held[row] = held
        self._mu[row] = mu

    def _change(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        totals = logits.new_empty((len(logits), 1), dtype=torch.float64)
        depths = _depths(context)
        # Rows of one sequence depend on each other: the tokens between them are drafts.
        for depth in range(int(depths.max()) + 1):
            index = np.flatnonzero(depths == depth)
            part, part_context = select(logits, context, index)
            where = torch.as_tensor(index, device=logits.device)
            part, part_totals = _cut(part, on_device(self._current(part_context), logits)[:, None])
            totals[where] = part_totals
            if part is not logits:
                logits[where] = part
            if depth < depths.max():
                places = np.asarray(part_context.positions) + 1
                rows = torch.as_tensor(part_context.rows, device=logits.device)
                following = context.tokens[rows, torch.as_tensor(places, device=logits.device)]
                self._advance(part, part_totals, following.long().clamp(min=0), part_context)
        self._last = logits, totals
        return logits

    def commit(self, token_ids: torch.Tensor, context: SamplingContext) -> None:
        """Update mu by the surprise of the chosen tokens."""
        index = np.flatnonzero(self.asked(context))
        if len(index):
            chosen = token_ids[torch.as_tensor(index, device=token_ids.device)]
            _, part_context = select(token_ids, context, index)
            self._advance(*self._last, chosen, part_context)
            del self._last

    def _current(self, context: SamplingContext) -> np.ndarray:
        """Return the rows' mu, float64 ``[R]``."""
        rows, places = np.asarray(context.rows, np.intp), np.asarray(context.positions)
        slots = places % NUM_KEPT_POSITIONS
        return np.where(self._held[rows, slots] == places, self._mu[rows, slots], 2 * self._tau[rows])

    def _advance(
        self, logits: torch.Tensor, totals: torch.Tensor, token_ids: torch.Tensor, context: SamplingContext
    ) -> None:
        """Write the mu of the next positions, given the tokens at them; waits for the device."""
        surprise = (totals - logits.gather(1, token_ids[:, None]).double()) / np.log(2)
        rows, places = np.asarray(context.rows, np.intp), np.asarray(context.positions) + 1
        mu = self._current(context) - self._eta[rows] * (surprise[:, 0].cpu().numpy() - self._tau[rows])
        slots = places % NUM_KEPT_POSITIONS
        self._held[rows, slots], self._mu[rows, slots] = places, mu


def _depths(context: SamplingContext) -> np.ndarray:
    """Return for each logits row how many earlier positions of its sequence are in the call, int64 ``[R]``. Pure."""
    positions: dict[int, set[int]] = {}
    for row, position in zip(context.rows, context.positions, strict=True):
        positions.setdefault(row, set()).add(position)
    ranks = {(row, place): rank for row, places in positions.items() for rank, place in enumerate(sorted(places))}
    return np.array([ranks[where] for where in zip(context.rows, context.positions, strict=True)], np.int64)


def _cut(logits: torch.Tensor, mu: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mask, in place, tokens of more surprise than mu; also return the log of the mass left, float64 ``[R, 1]``."""
    surprise = logits.double().log_softmax(-1).div_(-np.log(2))
    logits.masked_fill_((surprise > mu) & (logits < logits.amax(-1, keepdim=True)), -torch.inf)
    return logits, logits.double().logsumexp(-1, keepdim=True)
