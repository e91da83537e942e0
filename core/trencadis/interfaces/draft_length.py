"""Contract of the noun ``draft_length``: how many tokens are worth drafting.

Asked before the speculator is, once per step. Text never depends on the answer: drafts cost time, never a token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np

from trencadis.errors import ContractError
from trencadis.faults import shown
from trencadis.interfaces.laws import Law, at_least, law, tell
from trencadis.records import Int32Array, Int64Array

__all__ = ["INTERFACE_VERSION", "STABILITY", "DraftLength", "LengthView", "VerifiedStep"]

INTERFACE_VERSION = 1
STABILITY = "stable"


@attrs.frozen(kw_only=True)
class LengthView:
    """The sequences that may be drafted for. Read-only; arrays are parallel.

    Attributes:
        slots: Stable slot of each sequence, int32 ``[num_sequences]``.
        epochs: Changes when a slot is given to another sequence, int64 ``[num_sequences]``.
        max_draft_tokens: The most drafts for each, int32 ``[num_sequences]``: what the speculator, the request and its remaining
            length allow; at least 1.
        num_running: Sequences that decode in this step, those that may not be drafted for included.
        num_waiting: Sequences that wait.
        padded_tokens: ``padded_tokens(num_sequences, query_len)``: token positions that a pass over so many sequences with so many
            tokens each costs; with a padded layout constant within a bucket, with a ragged one the product. Pure.
        pads: Every sequence of a pass costs as many positions as the longest, so that drafts up to there are free; else each costs
            its own tokens.
    """

    slots: Int32Array
    epochs: Int64Array
    max_draft_tokens: Int32Array
    num_running: int
    num_waiting: int
    padded_tokens: Callable[[int, int], int]
    pads: bool = False


@attrs.frozen(kw_only=True)
class VerifiedStep:
    """What became of one step's drafts; arrays are parallel.

    Attributes:
        slots: Sequences that decoded, int32 ``[num_sequences]``.
        epochs: Epoch of each, int64 ``[num_sequences]``.
        num_drafts: Drafts that were verified, int32 ``[num_sequences]``; 0 for those without.
        num_accepted: Drafts that stand, int32 ``[num_sequences]``.
        num_tokens: Token positions the step computed, padding included, prefills too.
        num_prefill_tokens: Number of the step's tokens that belong to prefills.
        draft_s: Time that the drafts took, and the choice of their number, seconds.
        step_s: Time of the step on the engine's clock without ``draft_s``, seconds: all that went by since the step before, or of a
            step that follows none, or admits sequences, from its planning to its result.
    """

    slots: Int32Array
    epochs: Int64Array
    num_drafts: Int32Array
    num_accepted: Int32Array
    num_tokens: int
    num_prefill_tokens: int
    draft_s: float
    step_s: float


def _counts_up_to(method: str, answer: Any, most: Any) -> Any:
    is_complete = isinstance(answer, np.ndarray) and answer.dtype.kind in "iu" and answer.shape == most.shape
    if is_complete and not ((answer < 0) | (answer > most)).any():
        return answer
    raise ContractError(f"{method}() returned {shown(answer)}, allowed are 0 to {shown(most)}")


class DraftLength(ABC):
    """Chooses draft lengths. Engine thread.

    A call may take ``[budget] draft_length_ms``. One that takes longer three times within a minute, or once ten times as long, is replaced
    by its fallback; without one speculation goes off.
    """

    @abstractmethod
    @law(Law("whole numbers from 0 to ``view.max_draft_tokens``", _counts_up_to, ("view.max_draft_tokens",)))
    def choose(self, view: LengthView) -> Int32Array:
        """Return the most drafts for each sequence, int32 ``[num_sequences]``, 0 .. ``view.max_draft_tokens``.

        Once per step with decodes; at most 20 µs and 1 µs per sequence. Must not look at what the drafts will be.
        """

    @law(at_least(0))
    def rest(self) -> int:
        """Return for how many of the next steps the lengths stand, 0 or more: in these nothing is asked and nothing told.

        Called after each ``choose``. Lengths stand while the same sequences decode, no drafts at all for any sequences.
        """
        return 0

    @tell  # noqa: B027 - optional
    def on_verified(self, step: VerifiedStep) -> None:
        """Receives what a step brought; once per commit of a step that decoded, with drafts or without, but where lengths stand."""

    @tell  # noqa: B027 - optional
    def on_finished(self, *, slot: int) -> None:
        """Called when a sequence left the engine."""
