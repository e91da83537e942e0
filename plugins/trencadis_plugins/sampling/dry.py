"""DRY, "don't repeat yourself": a penalty that grows with the length of the run that a token would repeat."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from trencadis.interfaces import SamplingContext
from trencadis.records import Int32Array, RowStart, SamplingParams
from trencadis_plugins.sampling.guard import RowStates
from trencadis_plugins.sampling.row_processor import RowProcessor, histories, on_device

__all__ = ["MAX_RUN", "Dry"]

MAX_RUN = 512
"""Longer repeats count as so many tokens: bounds the time that a history of one token takes."""

_LARGEST = 1e30
"""The most that is subtracted; float32 could not hold much more, and the token is impossible with far less."""


class Dry(RowProcessor):
    """Subtracts ``multiplier * base ** (n - allowed_length)`` from a token that followed an earlier copy of the last n tokens.

    n is the longest such run, at least ``allowed_length``, within the last ``dry_range`` tokens; a run neither contains nor continues
    with a breaker.

    Source: p-e-w, "DRY: a modern repetition penalty", text-generation-webui pull request 5677, 2024.
    """

    honours = frozenset({"dry"})
    example = ("dry_multiplier", 1e-6)
    needs_history = True
    supports_branches = True

    def allocate(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Make room for ``num_rows`` sequences."""
        super().allocate(num_rows=num_rows, vocab_size=vocab_size, device=device)
        self._params = RowStates[SamplingParams]("dry")

    def applies_to(self, start: RowStart) -> bool:
        """Return whether repeats cost anything. Pure."""
        return start.params.dry_multiplier > 0

    def _take(self, start: RowStart) -> None:
        self._params[start.row] = start.params

    def _change(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        for row_logits, row, history in zip(logits, context.rows, histories(context), strict=True):
            params = self._params[row]
            tokens, runs = repeats(history[-params.dry_range :], params.dry_breaker_token_ids)
            counts = runs >= params.dry_allowed_length
            row_logits[on_device(tokens[counts], logits)] -= on_device(_penalties(runs[counts], params), logits)
        return logits


def repeats(history: Int32Array, breakers: tuple[int, ...]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return tokens that would continue a repeat, each once, and the longest run each would continue. Pure; O(history * run).

    Args:
        history: Tokens so far, at least one.
        breakers: No run contains them, and they continue none.
    """
    is_breaker = np.isin(history, breakers)
    ends = (
        np.flatnonzero((history[:-1] == history[-1]) & ~is_breaker[1:]) if not is_breaker[-1] else np.empty(0, np.int64)
    )
    found: dict[int, int] = {}
    run, alive = 1, ends
    while len(alive):
        # Later runs are longer: the last one written counts.
        found.update(dict.fromkeys(history[alive + 1].tolist(), run))
        if run == MAX_RUN or run == len(history) or is_breaker[-run - 1]:
            break
        alive = alive[alive >= run]
        alive = alive[history[alive - run] == history[-run - 1]]
        run += 1
    return np.array(list(found), np.int64), np.array(list(found.values()), np.int64)


def _penalties(runs: npt.NDArray[np.int64], params: SamplingParams) -> npt.NDArray[np.float32]:
    logs = math.log(params.dry_multiplier) + (runs - params.dry_allowed_length) * math.log(params.dry_base)
    penalties: npt.NDArray[np.float32] = np.exp(np.minimum(logs, math.log(_LARGEST))).astype(np.float32)
    return penalties
