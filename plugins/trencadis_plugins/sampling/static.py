"""The standard chain with static shapes: every row goes through every processor of its call's path.

    path    masks and penalties   truncation
    -----   -------------------   ----------------------------------------------------------
    which   none | all            none | within the 64 most likely tokens | of all tokens
    host    the whole chain, on the host

A call takes the path that its most demanding row needs; the others are computed with parameters that change nothing. So a device
that compiles for each run of operations has six of them for each number of rows, the plain argmax and the host path aside, and
log-probabilities double that. A row that asks for a processor without a static form takes its call to the host, where shapes cost
nothing; see ``host.py``.

Shapes: L logits rows in a call, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from trencadis.interfaces import LogitsProcessor, SamplingContext
from trencadis.records import SamplingParams
from trencadis_plugins.sampling.penalties import Penalties
from trencadis_plugins.sampling.row_processor import RowMask, RowProcessor
from trencadis_plugins.sampling.top_k import TopK
from trencadis_plugins.sampling.top_p import TopP

__all__ = ["NARROW", "StaticChain"]

NARROW = 64
"""A top-k up to this is found without sorting the vocabulary. Tokens that tie for the last of so many places may be dropped."""


class StaticChain:
    """Applies the processors of a chain to all rows of a call.

    Attributes:
        on_host: Which processors of the whole chain have no static form, bool ``[P]``.

    Args:
        chain: All processors.
        masks: Add numbers that the host knows.
        penalties: Needs the history; after the masks.
        tail: Temperature and truncation, in order.
    """

    def __init__(
        self,
        chain: Sequence[LogitsProcessor],
        masks: Sequence[RowMask],
        penalties: Penalties,
        tail: Sequence[RowProcessor],
    ) -> None:
        self._on_host = [one for one in chain if one not in (*masks, penalties, *tail)]
        self.on_host = np.array([one in self._on_host for one in chain], np.bool_)
        self._masks = tuple(masks)
        self._penalties = penalties
        self._tail = tuple(tail)
        self._truncations = tuple(one for one in tail if isinstance(one, TopK | TopP))

    @classmethod
    def of(cls, chain: Sequence[LogitsProcessor]) -> StaticChain | None:
        """Return the static form of a chain; None unless its order is masks, penalties, truncation."""
        static = [one for one in chain if _is_static(one)]
        masks = [one for one in static if isinstance(one, RowMask)]
        penalties = [one for one in static if isinstance(one, Penalties)]
        tail = [one for one in static if isinstance(one, RowProcessor) and not isinstance(one, RowMask | Penalties)]
        if [*masks, *penalties, *tail] != static or len(penalties) != 1:
            return None
        if not any(isinstance(one, TopK | TopP) for one in tail):
            return None
        return cls(chain, masks, penalties[0], tail)

    def paths(self) -> tuple[SamplingParams, ...]:
        """Return parameters that use each path, those with log-probabilities last. Pure."""
        tails = ({"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 0.7, "top_k": 8}, {"top_p": 0.9})
        heads: tuple[dict[str, float], ...] = ({}, {"presence_penalty": 0.5})
        of_host = dict(one.example for one in self._on_host if isinstance(one, RowProcessor) and one.example)
        paths: list[SamplingParams] = []
        for logprobs in (None, 1):
            paths += [
                SamplingParams(**{"temperature": 1.0, **tail}, **head, logprobs=logprobs)  # type: ignore[arg-type]
                for head in heads
                for tail in tails
            ]
            if of_host:
                paths.append(SamplingParams(**of_host, logprobs=logprobs))
        return tuple(paths)

    def apply(self, logits: torch.Tensor, context: SamplingContext, *, draws: np.ndarray) -> torch.Tensor:
        """Return processed logits, float32 ``[L, V]``; may work in place.

        Args:
            logits: float32 ``[L, V]``.
            context: Whose they are.
            draws: Which rows are drawn from; of any other the largest alone matters, bool ``[L]``.
        """
        if any(one.asked(context).any() for one in (*self._masks, self._penalties)):
            logits = logits + torch.as_tensor(self._bias(context, logits.shape[1]), device=logits.device)
            logits = self._penalties.apply_all(logits, context, width=logits.shape[1])
        width = self._width(context, draws, logits.shape[1])
        for one in self._tail:
            if width or one not in self._truncations:
                logits = one.apply_all(logits, context, width=width)
        return logits

    def _bias(self, context: SamplingContext, vocab_size: int) -> np.ndarray:
        """Return the sum of masks and biases, float32 ``[L, V]`` on the host."""
        bias = np.zeros((len(context.rows), vocab_size), np.float32)
        for one in self._masks:
            for index in np.flatnonzero(one.asked(context)).tolist():
                one.add_to(bias[index], context.rows[index], context.positions[index])
        return bias

    def _width(self, context: SamplingContext, draws: np.ndarray, vocab_size: int) -> int:
        """Return how many tokens truncation needs: none, ``NARROW``, or all."""
        asked = np.any([one.asked(context) & draws for one in self._truncations], axis=0)
        if not asked.any():
            return 0
        # After a top-k no processor needs more tokens than it left; a top-p before it sees all.
        first = self._truncations[0]
        if not isinstance(first, TopK):
            return vocab_size
        num_kept = first.num_kept(context)[asked]
        is_narrow = bool(((num_kept > 0) & (num_kept <= NARROW)).all())
        return min(NARROW, vocab_size) if is_narrow else vocab_size


def _is_static(one: LogitsProcessor) -> bool:
    """Return whether a processor has a static form; subclasses of other packages do not. Pure."""
    if not isinstance(one, RowProcessor) or not type(one).__module__.startswith("trencadis_plugins."):
        return False
    return isinstance(one, RowMask) or type(one).apply_all is not RowProcessor.apply_all
