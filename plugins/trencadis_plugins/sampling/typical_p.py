"""Locally typical sampling: keeps tokens whose surprise is near the entropy.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

from trencadis.interfaces import SamplingContext
from trencadis.records import RowStart
from trencadis_plugins.sampling.row_processor import RowProcessor

__all__ = ["TypicalP"]

_WIDTHS = (512, 8192)
"""How many of the most typical tokens are looked at, on a CPU, before all of them are sorted."""


class TypicalP(RowProcessor):
    """Keeps the tokens with the smallest | -ln p - H | until their mass reaches ``typical_p``, and all that tie with the last.

    H is the entropy. The most likely token may be dropped: greedy rows, which have no distribution to cut, do not ask.

    Source: Meister et al., "Locally typical sampling", 2023, section 4; ties as transformers.
    """

    honours = frozenset({"typical_p"})
    example = ("typical_p", 0.9)

    def allocate(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Make room for ``num_rows`` sequences."""
        super().allocate(num_rows=num_rows, vocab_size=vocab_size, device=device)
        self._mass = np.ones(num_rows, dtype=np.float64)

    def applies_to(self, start: RowStart) -> bool:
        """Return whether typical-p is on. Pure."""
        return start.params.typical_p < 1 and not start.params.is_greedy

    def _take(self, start: RowStart) -> None:
        self._mass[start.row] = start.params.typical_p

    def _change(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        log_distribution = logits.double().log_softmax(-1)
        distribution = log_distribution.exp()
        entropy = torch.special.entr(distribution).sum(-1, keepdim=True)
        distance = (log_distribution + entropy).abs_()
        last = _last_kept(distance, distribution, self._column(self._mass, context))
        return logits.masked_fill_(distance > last, -torch.inf)


def _last_kept(distance: torch.Tensor, distribution: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """Return the distance at which the mass is reached, float64 ``[R, 1]``. Pure."""
    vocab_size = distance.shape[1]
    # Only a host may look whether a few sufficed without waiting for a device.
    widths = [width for width in _WIDTHS if width < vocab_size] if distance.device.type == "cpu" else []
    for width in [*widths, vocab_size]:
        nearest = distance.topk(width, largest=False)
        num_below = (distribution.gather(1, nearest.indices).cumsum(-1) < mass).sum(-1, keepdim=True)
        if width == vocab_size or bool((num_below < width).all()):
            break
    return nearest.values.gather(1, num_below.clamp(max=width - 1))
