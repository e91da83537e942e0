"""Contract of the noun ``speculation``: who drafts tokens for the model to verify.

    draft length ─ how many ─▶ speculator ─ drafts ─▶ backend: one pass over all of them ─ acceptance rule ─▶ those that stand

The engine asks a speculator for drafts when it makes a plan; the backend computes them with the sequence's newest token in one
pass, and an acceptance rule (noun ``acceptance``) says how many stand. How many to ask for is the noun ``draft_length``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np

from trencadis.errors import ContractError
from trencadis.faults import shown
from trencadis.interfaces.laws import Law, law, tell
from trencadis.interfaces.optional_calls import HeadGuesses
from trencadis.records import BoolArray, BucketLimits, Drafts, Int32Array, Int64Array, Request

__all__ = ["INTERFACE_VERSION", "STABILITY", "DraftView", "Speculator"]

INTERFACE_VERSION = 1
STABILITY = "stable"


@attrs.frozen(kw_only=True)
class DraftView:
    """The sequences to draft for. Read-only; everything is parallel.

    Attributes:
        slots: Stable slot of each sequence, int32 ``[num_sequences]``.
        epochs: Changes when a slot is given to another sequence or a preempted one comes back, int64 ``[num_sequences]``.
        token_ids: All known tokens of each, prompt and output, int32 arrays. Views of the engine's own memory: they are valid
            during the call.
        max_draft_tokens: The most drafts for each, int32 ``[num_sequences]``; may be 0.
        requests: Whose sequences they are: sampling parameters, tenant, cache salt. Of a sequence it is the same object in each call.
        seeds: Key of each sequence's random numbers, 0 .. 2**64 - 1.
            A position that is drafted again in a later step needs new numbers: some rules look at drafts after the one they refuse.
        linear_only: Sequences that may not get two drafts after one token, bool ``[num_sequences]``.
        head: ``head(min_probability)``: the drafts of the model's own head, at most ``max_draft_tokens`` of each, int32 ``[num_sequences, most]``, -1
            where there is none; None where the engine has no such head. Takes a call of the device.
        rank: ``rank(owners=, token_ids=, parents=, num_ranked=)``: the most likely tokens after nodes of draft trees, of that head;
            see ``HeadNodes``. A call of the device for each level. None where there is no head.
    """

    slots: Int32Array
    epochs: Int64Array
    token_ids: tuple[Int32Array, ...]
    max_draft_tokens: Int32Array
    requests: tuple[Request, ...]
    seeds: tuple[int, ...]
    linear_only: BoolArray
    head: Callable[[float], Int32Array] | None = None
    rank: Callable[..., HeadGuesses] | None = None


def _drafts_for(_: str, drafts: Any, view: DraftView) -> Any:
    counts, most = drafts.num_drafts, view.max_draft_tokens
    columns = [counts, drafts.token_ids, *([] if drafts.parents is None else [drafts.parents])]
    columns += [] if drafts.distributions is None else [drafts.distributions.rows]
    if any(column.ndim != 1 or column.dtype.kind != "i" for column in columns):
        raise ContractError(f"its drafts are no arrays of whole numbers: {', '.join(map(shown, columns))}")
    if any(len(column) != len(drafts.token_ids) for column in columns[1:]):
        lengths = ", ".join(str(len(column)) for column in columns[1:])
        raise ContractError(f"its drafts have columns of {lengths} rows")
    is_within = len(counts) == len(most) and not ((counts < 0) | (counts > most)).any()
    if not is_within or len(drafts.token_ids) != int(counts.sum()):
        raise ContractError(f"it drafted {shown(counts)}, allowed are {shown(most)}")
    if drafts.distributions is not None and len(drafts.token_ids):
        rows, shape = drafts.distributions.rows, tuple(drafts.distributions.probabilities.shape)
        if len(shape) != 2 or int(rows.min()) < -1 or int(rows.max()) >= shape[0]:
            raise ContractError(
                f"it drew drafts by the rows {shown(rows)} of probabilities of the shape {shown(shape)}"
            )
    if drafts.parents is not None:
        within = np.arange(len(drafts.parents)) - np.repeat(np.cumsum(counts) - counts, counts)
        if ((drafts.parents != within - 1) & np.repeat(view.linear_only, counts)).any():
            raise ContractError("it drafted a tree where drafts must be linear")
        if (drafts.parents < -1).any() or (drafts.parents >= within).any():
            raise ContractError("it drafted a tree in which a draft comes before its parent")
    return drafts


class Speculator(ABC):
    """Proposes tokens. Engine thread; only committed tokens are shown to it.

    A call of ``propose``, ``on_verified`` or ``on_finished`` may take ``[budget] speculation_ms``. A speculator that takes longer three
    times within a minute, or once ten times as long, is replaced by its fallback; without one speculation goes off. The first four
    such calls are only warned about: they may compile.

    Attributes:
        max_draft_tokens: The most drafts it proposes for one sequence in a step; constant.
        uses_head: It calls ``DraftView.head`` or ``rank``; constant. The backend must provide ``backend.head``.
        drafts_trees: It may propose several drafts after one token (``Drafts.parents``); constant. The backend must provide
            ``backend.tree_attention``, and the acceptance rule take trees.
    """

    max_draft_tokens: int
    uses_head: bool = False
    drafts_trees: bool = False

    @property
    def kv_bytes_per_token(self) -> int:
        """What it keeps on the device for each token of the engine's KV cache, bytes: taken from the cache's room.

        Read once, before the room is measured: whatever else is to lie on the device is loaded by then.
        """
        return 0

    def allocate(self, limits: BucketLimits) -> None:  # noqa: B027 - optional
        """Receives the engine's sizes; once, before the first ``propose``, to allocate and prepare."""

    @abstractmethod
    @law(Law("drafts within ``view.max_draft_tokens``, linear where ``view.linear_only``", _drafts_for, ("view",)))
    def propose(self, view: DraftView) -> Drafts:
        """Return at most ``view.max_draft_tokens`` drafts for each sequence, in the view's order.

        Called once per step that drafts; the cost counts against every step. A sequence may be left out of a call and come back
        in a later one.
        """

    @tell  # noqa: B027 - optional
    def on_verified(self, *, slots: Int32Array, num_drafts: Int32Array, num_accepted: Int32Array) -> None:
        """Receives how many drafts of each sequence were accepted; once per commit of a step with drafts."""

    @tell  # noqa: B027 - optional
    def on_finished(self, *, slot: int, token_ids: Int32Array) -> None:
        """Called when a sequence left the engine.

        Args:
            slot: Slot of the sequence.
            token_ids: Output tokens of the sequence, without the prompt, int32 ``[num_output_tokens]``.
        """

    def close(self) -> None:  # noqa: B027 - optional
        """Free what was allocated; the object is not used again. May be called twice."""
