"""Base of the standard chain's processors: tracks the rows that use a processor, and changes only those."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import attrs
import numpy as np
import torch

from trencadis.interfaces import LogitsProcessor, SamplingContext
from trencadis.records import Int32Array, RowStart
from trencadis_plugins.sampling.arithmetic import tensor_on

__all__ = ["RowMask", "RowProcessor", "histories", "largest", "on_device", "select", "whose"]


def select(logits: torch.Tensor, context: SamplingContext, index: np.ndarray) -> tuple[torch.Tensor, SamplingContext]:
    """Return some of the logits rows, and their sequences. Pure; a copy unless ``index`` has every row.

    Args:
        logits: ``[L, V]``.
        context: Context of all L rows.
        index: Ascending indices of logits rows, intp ``[n]``.
    """
    if len(index) == len(context.rows):
        return logits, context
    return logits[tensor_on(index, logits.device)], whose(context, index)


def whose(context: SamplingContext, index: np.ndarray) -> SamplingContext:
    """Return the sequences of some logits rows. Pure."""
    rows = tuple(context.rows[i] for i in index)
    positions = tuple(context.positions[i] for i in index)
    branches = None if context.branches is None else tuple(context.branches[i] for i in index)
    return attrs.evolve(context, rows=rows, positions=positions, branches=branches)


def largest(logits: torch.Tensor, width: int) -> torch.Tensor:
    """Return the ``width`` largest logits of each row, descending, ``[L, width]``, whatever the device. Pure."""
    if width < logits.shape[1]:
        return logits.topk(width).values
    return logits.sort(descending=True).values


def on_device(numbers: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
    """Return numbers as a tensor on the logits' device. Pure."""
    return tensor_on(numbers, logits.device)


def histories(context: SamplingContext) -> list[Int32Array]:
    """Return the tokens up to each logits row's position, on the host. Pure; waits for the device once."""
    width = max(context.positions) + 1
    rows = tensor_on(context.histories, context.tokens.device)
    tokens = context.tokens[rows, :width].cpu().numpy()
    return [row[: position + 1] for row, position in zip(tokens, context.positions, strict=True)]


class RowProcessor(LogitsProcessor):
    """A processor that only some rows use; a subclass gets the logits of those rows only.

    Attributes:
        label: The request's fields with which it may mask every token, for messages; empty: it always leaves a token.
        example: A parameter and a value that ask for it, for the warm-up; only of processors without a static form.
        failures: Why every token of a logits row was masked, by row and position, where the request is not to blame.
    """

    label: str = ""
    failures: Mapping[tuple[int, int], str] = MappingProxyType({})
    example: tuple[str, Any] | None = None
    _vocab_size = 1 << 62
    """Tokens; before ``allocate`` more than any parameter says, so that :meth:`applies_to` can be asked."""

    def allocate(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Make room for ``num_rows`` sequences."""
        self._asked = np.zeros(num_rows, dtype=np.bool_)
        self._vocab_size = vocab_size

    @abstractmethod
    def applies_to(self, start: RowStart) -> bool:
        """Return whether the sequence's parameters use this processor. Pure."""

    def start_row(self, start: RowStart) -> None:
        """Set the parameters of a sequence; replaces those of the row's former one."""
        self._asked[start.row] = asked = self.applies_to(start)
        if asked:
            self._take(start)

    def apply(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        """Change the rows that use the processor, in place; no work if there are none."""
        index = np.flatnonzero(self._asked[np.asarray(context.rows, dtype=np.intp)])
        if not len(index):
            return logits
        part, part_context = select(logits, context, index)
        changed = self._change(part, part_context)
        if len(index) == len(context.rows):
            return changed
        logits[tensor_on(index, logits.device)] = changed
        return logits

    def apply_all(self, logits: torch.Tensor, context: SamplingContext, *, width: int) -> torch.Tensor:
        """Change rows by operations that depend on the shape of ``logits`` and on ``width`` only; may work in place.

        Rows that did not ask are computed with parameters that change nothing, and stay bit-equal.

        Args:
            logits: float32 ``[L, V]``.
            context: Whose they are.
            width: How many of the most likely tokens of a row are looked at where that matters, at most V.

        Raises:
            NotImplementedError: The processor is a mask or needs the history; see ``static.py``.
        """
        raise NotImplementedError(f"{type(self).__name__} has no form with static shapes")

    def asked(self, context: SamplingContext) -> np.ndarray:
        """Return which logits rows use the processor, bool ``[L]``. Pure."""
        return self._asked[np.asarray(context.rows, dtype=np.intp)]

    @abstractmethod
    def _take(self, start: RowStart) -> None:
        """Keep the parameters of a sequence that uses the processor."""

    @abstractmethod
    def _change(self, logits: torch.Tensor, context: SamplingContext) -> torch.Tensor:
        """Return changed logits of rows that all use the processor, float32 ``[R, V]``; may work in place."""

    def _column(self, values: np.ndarray, context: SamplingContext) -> torch.Tensor:
        """Return the rows' values as a column ``[R, 1]`` on the device."""
        return tensor_on(values[np.asarray(context.rows, dtype=np.intp)], context.tokens.device)[:, None]

    def _flags(self, context: SamplingContext) -> torch.Tensor:
        """Return which rows use the processor, as a column on the device, bool ``[L, 1]``."""
        return tensor_on(self.asked(context), context.tokens.device)[:, None]

    def _column_or(self, values: np.ndarray, neutral: float, context: SamplingContext) -> torch.Tensor:
        """Return the same, with ``neutral`` for rows that do not use the processor."""
        chosen = np.where(self.asked(context), values[np.asarray(context.rows, dtype=np.intp)], neutral)
        return tensor_on(chosen.astype(values.dtype), context.tokens.device)[:, None]


class RowMask(RowProcessor):
    """A processor that adds a number to each logit: 0, minus infinity, or a bias."""

    @abstractmethod
    def add_to(self, bias: np.ndarray, row: int, position: int) -> None:
        """Add the row's mask or bias to ``bias``; for rows that use the processor.

        Args:
            bias: float32 ``[V]`` on the host, changed in place.
            row: The row.
            position: Position of the token that yields the logits row.
        """
