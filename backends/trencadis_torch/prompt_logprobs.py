"""Log-probabilities of prompt tokens: of each, given the tokens before it.

Shapes: P prompt positions of a pass that were asked for, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import numpy as np
import numpy.typing as npt
import torch

from trencadis.records import Pass, TokenLogprobs
from trencadis_torch.device import to_device
from trencadis_torch.rows import Rows

__all__ = ["PromptLogprobs", "PromptPlan", "score_prompt"]

SLICE = 64
"""Positions scored at once: float32 log-probabilities of a large vocabulary are big."""


@attrs.frozen(kw_only=True)
class PromptPlan:
    """Which prompt positions of a pass are scored.

    Attributes:
        indices: Index in the engine's plan of each position's sequence, ``[P]``.
        positions: Position whose logits are read; the token scored is the next one, ``[P]``.
        rows: Row of each, ``[P]``.
        num_top: Alternatives to report, ``[P]``.
        tokens: Index of each position's token in the pass, ``[P]``.
    """

    indices: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    num_top: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]

    @classmethod
    def of(cls, one: Pass, firsts: npt.NDArray[np.int64], rows: Rows) -> PromptPlan | None:
        """Return the plan of a pass, or None if nothing was asked for. Pure."""
        counts = one.num_prompt_logits
        if not counts.any():
            return None
        of = np.repeat(np.arange(len(counts)), counts)
        within = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
        return cls(
            indices=one.indices[of].astype(np.int64),
            positions=one.starts[of] + within,
            rows=one.rows[of].astype(np.int64),
            num_top=np.array(rows.prompt_logprobs, np.int64)[one.rows[of]],
            tokens=firsts[of] + within,
        )


@attrs.frozen(kw_only=True)
class PromptLogprobs:
    """Scores of prompt tokens; copied to the host when the step is launched, and read when it is waited for.

    Attributes:
        plan: Positions that are scored.
        token_ids: The prompt's tokens, ``[P]``; like the rest it may go on beyond the plan's positions, with padding.
        logprobs: Theirs, ``[P]``.
        ranks: Theirs, ``[P]``.
        top_token_ids: ``[P, most]``.
        top_logprobs: ``[P, most]``.
    """

    plan: PromptPlan
    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_token_ids: torch.Tensor
    top_logprobs: torch.Tensor

    def moved(self, to_host: Callable[[torch.Tensor], torch.Tensor]) -> PromptLogprobs:
        """Return the same with each tensor as ``to_host`` returns it."""
        return attrs.evolve(
            self,
            token_ids=to_host(self.token_ids),
            logprobs=to_host(self.logprobs),
            ranks=to_host(self.ranks),
            top_token_ids=to_host(self.top_token_ids),
            top_logprobs=to_host(self.top_logprobs),
        )

    def records(self) -> list[TokenLogprobs]:
        """Return one record per position; the tensors are on the host."""
        scores = (self.token_ids, self.logprobs, self.ranks, self.top_token_ids, self.top_logprobs)
        columns = zip(
            self.plan.indices.tolist(),
            self.plan.positions.tolist(),
            self.plan.num_top.tolist(),
            # Cut on the host: a device that compiles would do so for each length.
            *(column[: len(self.plan.indices)].tolist() for column in scores),
            strict=True,
        )
        return [
            TokenLogprobs(
                index=index,
                position=position + 1,
                token_id=token,
                logprob=logprob,
                rank=rank,
                top_token_ids=tuple(top_ids[:num_top]),
                top_logprobs=tuple(top_logprobs[:num_top]),
            )
            for index, position, num_top, token, logprob, rank, top_ids, top_logprobs in columns
        ]


def score_prompt(logits: torch.Tensor, plan: PromptPlan, rows: Rows, *, num_top: int | None = None) -> PromptLogprobs:
    """Score the prompt tokens that follow the plan's positions.

    Args:
        logits: ``[P, V]`` in the model's dtype.
        plan: Whose.
        rows: The tokens.
        num_top: Alternatives to find, whatever the plan's positions ask for; None: as many as they do.
    """
    where = to_device(np.stack([plan.rows, plan.positions + 1]), logits.device)
    targets = rows.tokens[where[0], where[1]].long()
    most = int(plan.num_top.max()) if num_top is None else num_top
    parts = []
    for first in range(0, len(targets), SLICE):
        scores = logits[first : first + SLICE].float().log_softmax(-1)
        own = scores.gather(1, targets[first : first + SLICE, None])
        top = scores.topk(most, dim=-1)
        parts.append((own[:, 0], 1 + (scores > own).sum(1), top.indices, top.values))
    logprobs, ranks, top_ids, top_logprobs = (torch.cat(column) for column in zip(*parts, strict=True))
    return PromptLogprobs(
        plan=plan,
        token_ids=targets,
        logprobs=logprobs,
        ranks=ranks,
        top_token_ids=top_ids,
        top_logprobs=top_logprobs,
    )
