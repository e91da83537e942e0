"""Top-p: keeps the smallest set of most likely tokens whose mass reaches p.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

from trencadis.interfaces import SamplingContext
from trencadis.records import RowStart
from trencadis_plugins.sampling.arithmetic import mass_before, total
from trencadis_plugins.sampling.row_processor import RowProcessor, largest

__all__ = ["TopP"]

_WIDTHS = (64, 512)
"""How many of the most likely tokens are looked at, on a CPU, before all of them are sorted."""

_MIN_VOCAB_SIZE = 4096
"""Below this, sorting all of them at once is cheaper than looking for the largest 64."""


class TopP(RowProcessor):
    """Drops a token if the tokens before it, most likely first, already have mass p; the most likely one stays.

    That is the rule "in ascending order, drop while the cumulative mass is at most 1 - p", read from the other end, where
    a short prefix decides. Among equally likely tokens the lower id comes first.

    Source: Holtzman et al., "The curious case of neural text degeneration", 2020, section 3.1; the boundary rule is that
    of transformers and vLLM.
    """

    honours = frozenset({"top_p"})
    argmax_invariant = True

    def allocate(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Make room for ``num_rows`` sequences."""
        super().allocate(num_rows=num_rows, vocab_size=vocab_size, device=device)
        self._p = np.ones(num_rows, dtype=np.float64)

    def applies_to(self, start: RowStart) -> bool:
        """Return whether top-p can drop a token. Pure."""
        return start.params.top_p < 1

    def _take(self, start: RowStart) -> None:
        self._p[start.row] = start.params.top_p

    def _change(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        peaks = logits.amax(-1, keepdim=True)
        target = _total((logits - peaks).exp_()) * self._column(self._p, context)
        threshold, num_tied, has_surplus = _find_thresholds(logits, peaks, target)
        # Ties beyond what p needs are rare; on a host it is cheap to know that there are none.
        if logits.device.type != "cpu" or bool(has_surplus.any()):
            is_tied = logits == threshold
            logits.masked_fill_(is_tied & (is_tied.cumsum(-1) > num_tied), -torch.inf)
        return logits.masked_fill_(logits < threshold, -torch.inf)

    def apply_all(self, logits: torch.Tensor, context: SamplingContext, *, width: int) -> torch.Tensor:
        """Truncate every row where its mass is reached; rows without top-p stay whole."""
        peaks = logits.amax(-1, keepdim=True)
        target = total((logits - peaks).exp_()) * self._column_or(self._p, 1.0, context)
        threshold, num_tied = _thresholds_within(logits, peaks, target, width)
        threshold = threshold.masked_fill(~self._flags(context), -torch.inf)
        is_tied = (logits == threshold) & self._flags(context)
        logits.masked_fill_(is_tied & (is_tied.cumsum(-1) > num_tied), -torch.inf)
        return logits.masked_fill_(logits < threshold, -torch.inf)


def _thresholds_within(
    logits: torch.Tensor, peaks: torch.Tensor, target: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest kept logit and how many of exactly that logit stay, ``[L, 1]`` each. Pure.

    Right if the mass is reached, or the row ends, within the ``width`` most likely tokens.
    """
    values = largest(logits, width)
    num_kept = (mass_before(values, peaks) < target).sum(-1, keepdim=True).clamp_(min=1)
    lowest = values.gather(1, num_kept - 1)
    return lowest, num_kept - (values > lowest).sum(-1, keepdim=True)


def _find_thresholds(
    logits: torch.Tensor, peaks: torch.Tensor, target: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the threshold of each row, and how many tokens at it stay. Pure.

    Args:
        logits: float32 ``[R, V]``.
        peaks: Largest logit, float32 ``[R, 1]``.
        target: Mass to reach, in units of the most likely token's, float64 ``[R, 1]``.

    Returns:
        The smallest logit that stays, how many tokens of exactly that logit stay, and whether there are more of them;
        ``[R, 1]`` each.
    """
    threshold = torch.empty_like(peaks)
    num_tied = torch.empty_like(peaks, dtype=torch.int64)
    has_surplus = torch.empty_like(peaks, dtype=torch.bool)
    pending = torch.arange(len(logits), device=logits.device)
    for width in _widths(logits):
        part = logits if len(pending) == len(logits) else logits[pending]
        values = _largest(part, width)
        before = mass_before(values, peaks[pending])
        num_kept = (before < target[pending]).sum(-1, keepdim=True).clamp_(min=1)
        threshold[pending] = lowest = values.gather(1, num_kept - 1)
        num_tied[pending] = num_kept - (values > lowest).sum(-1, keepdim=True)
        has_surplus[pending] = (num_kept < width) & (values.gather(1, num_kept.clamp(max=width - 1)) == lowest)
        if width == logits.shape[1]:
            break
        # Decided once a token is seen that does not stay: it also shows whether ties are left over.
        pending = pending[before[:, -1] < target[pending, 0]]
        if not len(pending):
            break
    return threshold, num_tied, has_surplus


def _widths(logits: torch.Tensor) -> list[int]:
    # Looking whether a prefix sufficed would make the host wait for a device: there, all tokens are sorted at once.
    vocab_size = logits.shape[1]
    is_partial = logits.device.type == "cpu" and vocab_size >= _MIN_VOCAB_SIZE
    return [*_WIDTHS, vocab_size] if is_partial else [vocab_size]


def _largest(logits: torch.Tensor, width: int) -> torch.Tensor:
    """Return the ``width`` largest logits of each row, descending, ``[R, width]``. Pure."""
    if width < logits.shape[1]:
        return logits.topk(width).values
    if logits.device.type == "cpu":
        # Values alone are wanted, and numpy 2 sorts them 25 times faster than torch 2.13 sorts pairs of value and index.
        return torch.from_numpy(np.sort(logits.detach().numpy(), axis=-1)).flip(-1)
    return logits.sort(descending=True).values


def _total(weights: torch.Tensor) -> torch.Tensor:
    """Return the sum of each row, ``[R, 1]``. Pure."""
    if weights.device.type == "cpu":
        # The same sum in a sixth of the time that torch 2.13 takes to add float32 into float64.
        return torch.from_numpy(weights.detach().numpy().sum(-1, keepdims=True, dtype=np.float64))
    return total(weights)
