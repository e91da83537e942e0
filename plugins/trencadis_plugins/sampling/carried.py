"""Processors' state across a preemption: restored when the sequence gets a row again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import attrs

from trencadis.interfaces import LogitsProcessor
from trencadis.records import RowStart

__all__ = ["CarriedStates"]

_MAX_SAVED = 4096

_Key = tuple[int, bytes, str]


@attrs.frozen
class _Holder:
    key: _Key
    processors: tuple[LogitsProcessor, ...]


class CarriedStates:
    """Tracks which row has which sequence's state, and saves the state of sequences that lost their row.

    A sequence is known by its seed, its prompt and its parameters: two that agree in all of these have, at the same position, the
    same state.

    Args:
        processors: Those that have a state.
    """

    def __init__(self, processors: Sequence[LogitsProcessor]) -> None:
        self._processors = tuple(processors)
        self._holders: dict[int, _Holder] = {}
        self._saved: OrderedDict[_Key, list[Any]] = OrderedDict()

    def leave(self, row: int) -> None:
        """Save the state of a row's sequence before the row is reassigned."""
        holder = self._holders.pop(row, None)
        if holder is not None:
            self._saved[holder.key] = _snapshots(holder, row)
            if len(self._saved) > _MAX_SAVED:
                self._saved.popitem(last=False)

    def enter(self, start: RowStart) -> None:
        """Restore the state of a sequence that had a row before; after the processors' own ``start_row``.

        Raises:
            ValueError: The state of a processor is lost that does not make it anew from the tokens.
        """
        processors = tuple(one for one in self._processors if one.applies_to(start))
        if not processors:
            return
        prompt = start.token_ids[: start.num_prompt_tokens].tobytes()
        holder = _Holder((start.seed, prompt, repr(start.params)), processors)
        if len(start.token_ids) > start.num_prompt_tokens:
            states = self._state_of(holder) or [None] * len(processors)
            for processor, state in zip(processors, states, strict=True):
                if state is not None:
                    processor.restore(start.row, state)
                elif not processor.rebuilds_state:
                    raise ValueError(
                        f"logits processor {processor.name or type(processor).__name__}: what it knew of this request is lost, and the request "
                        "cannot go on without. Send it again."
                    )
        self._holders[start.row] = holder

    def _state_of(self, sequence: _Holder) -> list[Any]:
        for row, holder in self._holders.items():
            if holder.key == sequence.key:
                return _snapshots(holder, row)
        return self._saved.pop(sequence.key, [])


def _snapshots(holder: _Holder, row: int) -> list[Any]:
    return [processor.snapshot(row) for processor in holder.processors]
