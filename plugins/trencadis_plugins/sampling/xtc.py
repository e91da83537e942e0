"""XTC, "exclude top choices": drops, at random, all plausible tokens except the least likely one."""

from __future__ import annotations

import numpy as np
import torch

from trencadis.interfaces import SamplingContext
from trencadis.records import RowStart
from trencadis_plugins.sampling.philox import Purpose, RowNumbers
from trencadis_plugins.sampling.row_processor import RowProcessor

__all__ = ["Xtc"]


class Xtc(RowProcessor):
    """With ``xtc_probability``, drops all tokens of probability ``xtc_threshold`` or more but the least likely of them.

    Of several least likely ones the highest id stays. Nothing happens unless two tokens reach the threshold. Whether it happens is
    decided by one number of the row's seed and the new token's position, of a purpose of its own. Greedy rows, whose token is the
    most likely one by definition, do not ask.

    Source: p-e-w, "Exclude Top Choices (XTC)", text-generation-webui pull request 6335, 2024.
    """

    honours = frozenset({"xtc_probability"})
    example = ("xtc_probability", 1e-6)

    def allocate(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Make room for ``num_rows`` sequences."""
        super().allocate(num_rows=num_rows, vocab_size=vocab_size, device=device)
        self._probability = np.zeros(num_rows, dtype=np.float64)
        self._threshold = np.ones(num_rows, dtype=np.float64)
        self._keys = np.zeros((num_rows, 2), dtype=np.int64)

    def applies_to(self, start: RowStart) -> bool:
        """Return whether XTC can drop a token. Pure."""
        params = start.params
        return params.xtc_probability > 0 and params.xtc_threshold <= 0.5 and not params.is_greedy

    def _take(self, start: RowStart) -> None:
        self._probability[start.row] = start.params.xtc_probability
        self._threshold[start.row] = start.params.xtc_threshold
        self._keys[start.row] = start.seed & 0xFFFFFFFF, start.seed >> 32

    def _change(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        keys, positions = self._keys[list(context.rows)], np.add(context.positions, 1)
        numbers = RowNumbers(keys=keys, positions=positions, device=context.tokens.device)
        happens = numbers.uniforms(Purpose.EXCLUDE)[:, None] < self._column(self._probability, context)
        is_top = logits.double().softmax(-1) >= self._column(self._threshold, context)
        least = logits.masked_fill(~is_top, torch.inf).amin(-1, keepdim=True)
        is_least = is_top & (logits == least)
        # The last of the least likely: nothing after it is one.
        stays = is_least & (is_least.flip(-1).cumsum(-1).flip(-1) == 1)
        return logits.masked_fill_(happens & is_top & ~stays, -torch.inf)
