"""Errors of single rows, without failing the other rows of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch

from trencadis.interfaces import LogitsProcessor, SamplingContext
from trencadis.records import RowError
from trencadis_plugins.sampling.arithmetic import on_host

__all__ = ["RowFailures", "RowStates", "RowsFailedError", "check_one_position", "no_finite_maximum"]

_WRONG_LOGITS = (
    "the model's logits of {where} have no finite largest value (it is {value}). The weights, the KV cache or a kernel are damaged or "
    'overflow: try [model] dtype = "float32".'
)
_NO_CHOICE = (
    "{asked} of this request leave {where} no token to choose (largest processed logit: {value}). Relax one of them."
)

_Place = tuple[int, int, int]
State = TypeVar("State")


class RowsFailedError(Exception):
    """Some rows of a call have no result; the others do.

    Attributes:
        logits: The results, float32 ``[L, V]``; what stands in the rows without one does not count, but is finite.
        messages: Why a row has none, by index.
    """

    def __init__(self, logits: torch.Tensor, messages: dict[int, str]) -> None:
        super().__init__("; ".join(messages.values()))
        self.logits = logits
        self.messages = messages


class RowStates(dict[int, State]):
    """What a processor keeps of the rows that use it. A row that is not there is an error of that row: its request does not go on without.

    Args:
        name: Name of the processor, for the message.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __missing__(self, row: int) -> State:
        raise ValueError(f"{self._name}: what this request asks for is lost (row {row}), and it cannot go on without.")


class RowFailures:
    """Errors of one call of a sampler, by logits row.

    A chain works on parts of a call, each with a context of its own: a logits row is known by device row, history and position.
    """

    def __init__(self) -> None:
        self._found: dict[_Place, tuple[str, bool]] = {}
        self._unread: list[Callable[[], None]] = []

    def add(self, context: SamplingContext, index: int, message: str, *, is_invalid: bool = False) -> None:
        """Record why a logits row has no token; the first reason counts. ``is_invalid``: the request itself is invalid."""
        self._found.setdefault(_place(context, index), (message, is_invalid))

    def check_logits(
        self,
        logits: torch.Tensor,
        context: SamplingContext,
        *,
        largest: torch.Tensor | None = None,
        is_last: bool = False,
    ) -> torch.Tensor:
        """Return logits without NaN: rows without a finite maximum become 0 and are recorded. Waits for the device once, if not on CUDA.

        Args:
            logits: The model's, ``[L, V]``; overwritten where they are wrong.
            context: Whose they are.
            largest: Place of each row's largest, int64 ``[L]``, where it is known.
            is_last: Nothing but the place of the largest is looked for afterwards, which a row without one has, too: on CUDA, rows
                stay as they are.
        """

        def note(index: int, value: float) -> None:
            self.add(context, index, _WRONG_LOGITS.format(where=_where(context, index), value=value))

        peaks = logits.amax(-1) if largest is None else logits.gather(1, largest[:, None])[:, 0]
        if _is_read_later(peaks):
            self._note_later(None if is_last else logits, peaks, note)
            return logits
        for index, value in no_finite_maximum(peaks):
            note(index, value)
            logits[index] = 0.0
        return logits

    def check_choices(
        self,
        logits: torch.Tensor,
        peaks: torch.Tensor,
        context: SamplingContext,
        asked: Callable[[int], str],
        failure: Callable[[int, int], str] = lambda *_: "",
    ) -> None:
        """Record rows in which masks and bias leave no token, and allow all their tokens. Waits for the device once, if not on CUDA.

        Args:
            logits: Processed, ``[L, V]``; overwritten where nothing is left.
            peaks: Largest of each row, ``[L]``; overwritten as well.
            context: Whose they are.
            asked: Names what a device row asks for that can rule tokens out.
            failure: Why a processor has ruled all of them out for a device row at a position, if that is no fault of the request's.
        """

        def note(index: int, value: float) -> None:
            message = failure(context.rows[index], context.positions[index])
            if message:
                self.add(context, index, message)
                return
            where = _where(context, index)
            message = _NO_CHOICE.format(asked=asked(context.rows[index]), where=where, value=value)
            self.add(context, index, message, is_invalid=True)

        if _is_read_later(peaks):
            self._note_later(logits, peaks, note)
            return
        for index, value in no_finite_maximum(peaks):
            note(index, value)
            logits[index], peaks[index] = 0.0, 0.0

    def _note_later(self, logits: torch.Tensor | None, peaks: torch.Tensor, note: Callable[[int, float], None]) -> None:
        """Make rows without a finite maximum 0 on the device, if any; which ones they were is read when the step is done."""
        values = on_host(peaks)
        if logits is not None:
            is_wrong = ~torch.isfinite(peaks)
            logits.masked_fill_(is_wrong[:, None], 0.0)
            peaks.masked_fill_(is_wrong, 0.0)

        def read() -> None:
            for index, value in enumerate(values()):
                if not -float("inf") < value < float("inf"):
                    note(index, value)

        self._unread.append(read)

    def fields(self, context: SamplingContext) -> dict[str, Any]:
        """Return the errors as the fields of ``Sampled``: those that are known, and where some are not, how to get them."""
        known = self.errors(context)
        if not self._unread:
            return {"row_errors": known}

        def late() -> tuple[RowError, ...]:
            for read in self._unread:
                read()
            self._unread.clear()
            told = {error.index for error in known}
            return tuple(error for error in self.errors(context) if error.index not in told)

        return {"row_errors": known, "late_errors": late}

    def errors(self, context: SamplingContext) -> tuple[RowError, ...]:
        """Return the errors, by index into the whole call. Pure."""
        if not self._found:
            return ()
        found = ((index, self._found.get(_place(context, index))) for index in range(len(context.rows)))
        return tuple(
            RowError(index=index, message=one[0], is_invalid=one[1]) for index, one in found if one is not None
        )


def _is_read_later(peaks: torch.Tensor) -> bool:
    """Return whether to leave the device alone: only CUDA's runs behind the host."""
    return peaks.device.type == "cuda"


def no_finite_maximum(peaks: torch.Tensor) -> list[tuple[int, float]]:
    """Return index and value of largest logits that are NaN or infinite; waits for the device once. Pure.

    Args:
        peaks: Largest logit of each row, ``[L]``.
    """
    if (
        peaks.device.type == "cpu" and peaks.dtype is torch.float32
    ):  # a fifth of the time of PyTorch's operations on so few
        is_sound = bool(np.isfinite(peaks.numpy()).all())
    else:
        is_sound = bool(torch.isfinite(peaks).all())
    if is_sound:
        return []
    return [(i, value) for i, value in enumerate(peaks.tolist()) if not -float("inf") < value < float("inf")]


def check_one_position(context: SamplingContext, processor: LogitsProcessor) -> None:
    """Refuse drafts for a processor that does not support them. Pure; host only.

    Args:
        context: Whose logits are sampled.
        processor: Looks at one position of a sequence at a time.

    Raises:
        ValueError: A sequence has logits at two positions in the call.
    """
    position_of: dict[int, int] = {}
    for row, position in zip(context.rows, context.positions, strict=True):
        if position_of.setdefault(row, position) != position:
            name = processor.name or type(processor).__name__
            raise ValueError(
                f"logits processor {name} is not safe with speculation, and row {row} at position {position} verifies drafts. "
                "Leave the processor out, or [speculation] name empty."
            )


def _place(context: SamplingContext, index: int) -> _Place:
    return context.rows[index], context.histories[index], context.positions[index]


def _where(context: SamplingContext, index: int) -> str:
    return f"row {context.rows[index]} at position {context.positions[index]}"
