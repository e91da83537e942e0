"""Sequences to draft for, and the conversion of a draft model's outputs to drafts.

Shapes: V vocabulary of the draft model, T vocabulary of the target.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt
import torch

from trencadis.errors import StepFailedError
from trencadis.records import Int32Array
from trencadis_plugins.speculation.draft_memory import Held
from trencadis_plugins.speculation.draft_runner import Query
from trencadis_plugins.speculation.draft_sampler import Guesses
from trencadis_plugins.speculation.draft_tokens import Translation

__all__ = ["Asked", "in_target", "joined", "read_linear"]


def joined(parts: Sequence[Int32Array]) -> Int32Array:
    """Return arrays one after another, int32; there may be none. Pure."""
    everything: Int32Array = np.concatenate([np.empty(0, np.int32), *parts]).astype(np.int32)
    return everything


@attrs.define(kw_only=True, eq=False)
class Asked:
    """A sequence to draft for.

    Attributes:
        index: In the view.
        held: Place in the draft model's memory.
        tokens: Text of the sequence in draft tokens, int32.
        num_known: Tokens of the target that this is.
        count: How many drafts.
        is_linear: They may not branch.
        is_greedy: They are certain: nothing is drawn.
        drafts: In draft tokens; set when they were read, int32 ``[n]``.
        distributions: Row of the distributions for each draft, -1 for none, int32 ``[n]``.
        parents: For drafts that branch, int32 ``[n]``.
    """

    index: int
    held: Held
    tokens: Int32Array
    num_known: int
    count: int
    is_linear: bool
    is_greedy: bool
    drafts: Int32Array = attrs.field(factory=lambda: joined([]))
    distributions: Int32Array = attrs.field(factory=lambda: joined([]))
    parents: Int32Array | None = None

    @property
    def num_missing(self) -> int:
        """Tokens of the text that the cache does not hold; at least 1."""
        return len(self.tokens) - len(self.held.tokens)

    @property
    def branches(self) -> Int32Array:
        """The parent of each draft."""
        line: Int32Array = np.arange(-1, len(self.drafts) - 1, dtype=np.int32)
        return line if self.parents is None else self.parents

    def query(self, guesses: Int32Array | None = None, parents: Int32Array | None = None) -> Query:
        """Return what computes the rest of the text, and guesses after it."""
        start = len(self.held.tokens)
        given = self.tokens[start:]
        if guesses is None:
            return Query(self.held, start, given)
        return Query(self.held, start, joined([given, guesses]), guessed=len(guesses), parents=parents)


def read_linear(asked: Sequence[Asked], taken: Sequence[Guesses], *, min_probability: float = 0.0) -> None:
    """Set the drafts of each sequence: draft j is what was chosen after token ``len(tokens) - 1 + j``.

    Args:
        asked: The sequences.
        taken: Outputs of the draft model; each keeps the most likely token of its logits rows unless ``min_probability`` is 0.
        min_probability: Greedy drafts end before the first that is less probable.

    Raises:
        StepFailedError: The backend did not ask the sampler for one of them.
    """
    places: dict[tuple[int, int], tuple[int, int]] = {}
    first = first_distribution = 0
    for guesses in taken:
        is_drawn = guesses.distributions is not None
        for i, place in enumerate(zip(guesses.rows, guesses.positions, strict=True)):
            places.setdefault(place, (first + i, first_distribution + i if is_drawn else -1))
        first += len(guesses.rows)
        first_distribution += len(guesses.rows) if is_drawn else 0
    # Put together on the host: a device that compiles would do so for each number and length of these.
    chosen = np.concatenate([guesses.token_ids.cpu().numpy() for guesses in taken]).astype(np.int32)
    # Ends depend on nothing that is drawn: drafts that are drawn would stand with other probabilities.
    logprobs = np.concatenate([_best_logprobs(guesses) for guesses in taken]) if min_probability else None
    for one in asked:
        last = len(one.tokens) - 1
        try:
            found = np.array([places[one.held.row, last + step] for step in range(one.count)], np.int32)
        except KeyError as error:
            raise StepFailedError(f"the draft backend sampled nothing at the row and position {error}.") from error
        one.drafts = chosen[found[:, 0]]
        if logprobs is not None and one.is_greedy:
            is_likely = logprobs[found[:, 0]] >= math.log(min_probability)
            one.drafts = one.drafts[: int(np.logical_and.accumulate(is_likely).sum())]
        one.distributions = np.full(len(one.drafts), -1, np.int32) if one.is_greedy else found[:, 1]


def _best_logprobs(guesses: Guesses) -> npt.NDArray[np.float32]:
    """Return the log-probability of the most likely token of each logits row, ``[L]``."""
    assert guesses.top is not None, "kept where drafts may end early"
    # Cut on the host: a device that compiles would compile that as well.
    best: npt.NDArray[np.float32] = guesses.top[0].cpu().numpy()[:, 0]
    return best


def in_target(drawn: Sequence[torch.Tensor], translation: Translation) -> torch.Tensor:
    """Return distributions ``[n, V]`` over the draft model's vocabulary as distributions over the target's, float32 ``[sum(n), T]``. Pure.

    Tokens that the target lacks have no share in them.
    """
    distributions = torch.cat(list(drawn))
    size = len(translation.to_draft)
    if translation.is_identity and size <= distributions.shape[1]:
        return distributions[:, :size]
    draft_ids = np.flatnonzero(translation.to_target >= 0)
    target_ids = torch.as_tensor(translation.to_target[draft_ids].astype(np.int64), device=distributions.device)
    found = distributions.new_zeros(len(distributions), size)
    found[:, target_ids] = distributions[:, torch.as_tensor(draft_ids, device=distributions.device)]
    return found
