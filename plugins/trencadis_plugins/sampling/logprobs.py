"""Log-probabilities of the model's own logits, or of those that the chain has processed.

Shapes: A logits rows that asked, V vocabulary.
"""

from __future__ import annotations

import attrs
import numpy as np
import torch

from trencadis.interfaces import SampledLogprobs, SamplingContext
from trencadis.records import MAX_LOGPROBS, RowStart
from trencadis_plugins.sampling.arithmetic import total
from trencadis_plugins.sampling.row_processor import select

__all__ = ["LogprobReporter", "RawLogits"]

_OFF = -1


@attrs.frozen(kw_only=True)
class RawLogits:
    """Data of logits rows that request log-probabilities, kept until their tokens are known.

    Attributes:
        index: Which logits rows, ascending, length A.
        num_top: How many alternatives each wants.
        logits: float32 ``[A, V]``.
        log_totals: Logarithm of the sum of the exponentials, float64 ``[A]``; float32 where there is no float64.
    """

    index: tuple[int, ...]
    num_top: tuple[int, ...]
    logits: torch.Tensor
    log_totals: torch.Tensor


class LogprobReporter:
    """Tracks which rows request log-probabilities, and reports them.

    Args:
        num_rows: Rows to make room for.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_top = np.full(num_rows, _OFF, dtype=np.int64)

    def start_row(self, start: RowStart) -> None:
        """Record the request of a sequence; replaces that of the row's former one."""
        self._num_top[start.row] = _OFF if start.params.logprobs is None else start.params.logprobs

    def applies_to(self, context: SamplingContext) -> np.ndarray:
        """Return which logits rows request log-probabilities, bool ``[L]``. Pure."""
        wants: np.ndarray = self._num_top[np.asarray(context.rows, dtype=np.intp)] != _OFF
        return wants

    def keep(self, logits: torch.Tensor, context: SamplingContext) -> RawLogits | None:
        """Return a copy of the rows to report, or None if there are none. Pure."""
        num_top = self._num_top[np.asarray(context.rows, dtype=np.intp)]
        index = np.flatnonzero(num_top != _OFF)
        if not len(index):
            return None
        part = select(logits, context, index)[0].to(torch.float32, copy=True)
        peaks = part.amax(-1, keepdim=True)
        totals = (part - peaks).exp_().sum(-1, dtype=torch.float64)
        return RawLogits(
            index=tuple(index.tolist()),
            num_top=tuple(num_top[index].tolist()),
            logits=part,
            log_totals=totals.log_() + peaks[:, 0],
        )

    def report(self, raw: RawLogits | None, token_ids: torch.Tensor) -> tuple[SampledLogprobs, ...]:
        """Return the log-probabilities of the sampled tokens and of the most likely ones. Pure; waits for the device.

        Args:
            raw: Result of :meth:`keep`.
            token_ids: The sampled tokens of all logits rows, int64 ``[L]``.
        """
        if raw is None:
            return ()
        tokens = token_ids[list(raw.index)]
        chosen = raw.logits.gather(1, tokens[:, None])
        ranks = 1 + (raw.logits > chosen).sum(-1)
        logprobs = chosen[:, 0] - raw.log_totals
        alternatives = (_most_likely(row, num_top) for row, num_top in zip(raw.logits, raw.num_top, strict=True))
        return tuple(
            SampledLogprobs(
                index=index,
                token_id=token,
                logprob=logprob,
                rank=rank,
                top_token_ids=tuple(ids),
                top_logprobs=tuple(value - total for value in values),
            )
            for index, token, logprob, rank, (ids, values), total in zip(
                raw.index,
                tokens.tolist(),
                logprobs.tolist(),
                ranks.tolist(),
                alternatives,
                raw.log_totals.tolist(),
                strict=True,
            )
        )

    def keep_all(self, logits: torch.Tensor, context: SamplingContext) -> RawLogits | None:
        """Return the rows to report with static shapes, or None if there are none. Pure.

        ``logits`` and ``log_totals`` are then of all L rows; ``index`` still names those that asked.
        """
        num_top = self._num_top[np.asarray(context.rows, dtype=np.intp)]
        index = np.flatnonzero(num_top != _OFF)
        if not len(index):
            return None
        every = logits.to(torch.float32, copy=True)
        peaks = every.amax(-1, keepdim=True)
        totals = total((every - peaks).exp_())[:, 0]
        return RawLogits(
            index=tuple(index.tolist()),
            num_top=tuple(num_top[index].tolist()),
            logits=every,
            log_totals=totals.log_() + peaks[:, 0],
        )

    def report_all(self, raw: RawLogits | None, token_ids: torch.Tensor) -> tuple[SampledLogprobs, ...]:
        """Return the log-probabilities of the requested rows from :meth:`keep_all`; waits for the device."""
        if raw is None:
            return ()
        chosen = raw.logits.gather(1, token_ids[:, None])
        ranks = (1 + (raw.logits > chosen).sum(-1)).tolist()
        values, ids = _most_likely_of_all(raw.logits, min(MAX_LOGPROBS, raw.logits.shape[1]))
        logprobs = (values - raw.log_totals.cpu()[:, None]).tolist()
        top_ids, own = ids.tolist(), (chosen[:, 0] - raw.log_totals).tolist()
        tokens = token_ids.tolist()
        return tuple(
            SampledLogprobs(
                index=index,
                token_id=tokens[index],
                logprob=own[index],
                rank=ranks[index],
                top_token_ids=tuple(top_ids[index][:num_top]),
                top_logprobs=tuple(logprobs[index][:num_top]),
            )
            for index, num_top in zip(raw.index, raw.num_top, strict=True)
        )


def _most_likely(logits: torch.Tensor, num_top: int) -> tuple[list[int], list[float]]:
    """Return ids and logits of the largest, descending, the lower id first of equals. Pure.

    ``topk`` alone would pick any of the tokens that tie for the last place.
    """
    if not num_top:
        return [], []
    lowest = logits.topk(min(num_top, len(logits))).values[-1]
    ids = (logits >= lowest).nonzero()[:, 0]
    values, order = logits[ids].sort(descending=True, stable=True)
    return ids[order[:num_top]].tolist(), values[:num_top].tolist()


def _most_likely_of_all(logits: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and ids ``[L, num_top]`` of the largest in each row, on the host; the order is that of :func:`_most_likely`. Pure.

    A stable sort of the whole vocabulary would do, but not every device has one.
    """
    lowest = logits.topk(num_top).values[:, -1:]
    size = logits.shape[1]
    # All above the last place, then those that tie for it; float32 holds the numbers of any vocabulary.
    places = (logits > lowest) * (2.0 * size) + (logits == lowest) * float(size)
    keys = places - torch.arange(size, dtype=torch.float32, device=logits.device)
    ids = keys.topk(num_top).indices
    values, ids = logits.gather(1, ids).cpu(), ids.cpu()
    ids, order = ids.sort()
    values, order = values.gather(1, order).sort(descending=True, stable=True)
    return values, ids.gather(1, order)
