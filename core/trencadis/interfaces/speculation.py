"""Contract of the noun ``speculation``: drafts, draft length, and the acceptance rule.

The engine asks a speculator for drafts when it makes a plan; the backend computes them with the sequence's next token in
one pass, samples every position with the ordinary sampler, and an acceptance rule says how many drafts stand.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import attrs

from trencadis.records import Drafts, Int32Array, Int64Array

if TYPE_CHECKING:
    import torch

__all__ = ["INTERFACE_VERSION", "AcceptanceRule", "DraftView", "Speculator"]

INTERFACE_VERSION = 1


@attrs.frozen(kw_only=True)
class DraftView:
    """The sequences to draft for. Read-only; arrays are parallel.

    Attributes:
        slots: Stable slot of each sequence, int32 ``[num_sequences]``.
        epochs: Changes when a slot is given to another sequence, int64 ``[num_sequences]``.
        token_ids: All known tokens of each, int32 arrays.
        max_draft_tokens: The most drafts for each, int32 ``[num_sequences]``; may be 0.
    """

    slots: Int32Array
    epochs: Int64Array
    token_ids: tuple[Int32Array, ...]
    max_draft_tokens: Int32Array


class Speculator(ABC):
    """Proposes tokens. Engine thread; only committed tokens are shown to it.

    Attributes:
        max_draft_tokens: The most drafts it proposes for one sequence in a step; constant.
    """

    max_draft_tokens: int

    @abstractmethod
    def propose(self, view: DraftView) -> Drafts:
        """Return at most ``view.max_draft_tokens`` drafts for each sequence, in the view's order.

        Called once per step that has decodes; the cost counts against every step.
        """

    def on_verified(self, *, slots: Int32Array, num_drafts: Int32Array, num_accepted: Int32Array) -> None:  # noqa: B027
        """Be told how many drafts of each sequence were accepted; once per commit."""

    def on_finished(self, *, slot: int) -> None:  # noqa: B027 - optional
        """Be told that a sequence left the engine."""


class AcceptanceRule(ABC):
    """Says how many drafts stand. Lives with the backend.

    Attributes:
        lossless: Emitted text has the law of sampling without speculation.
    """

    lossless: bool

    @abstractmethod
    def accept(self, *, sampled: torch.Tensor, drafts: torch.Tensor, num_drafts: torch.Tensor) -> torch.Tensor:
        """Return the number of accepted drafts, int64 ``[B]``. Pure.

        Args:
            sampled: Tokens the sampler chose at each position, int64 ``[B, k + 1]``.
            drafts: int64 ``[B, k]``, padded with -1.
            num_drafts: int64 ``[B]``.
        """
