"""Log-probabilities of prompt tokens with shapes determined by the bucket.

Every token position of a pass is scored: the requested ones first, then padding, whose scores the host drops.

Shapes: P prompt positions asked for, T token positions of the bucket, V vocabulary.
"""

from __future__ import annotations

import attrs
import numpy as np
import torch

from trencadis.records import MAX_LOGPROBS
from trencadis_torch.device import to_device
from trencadis_torch.prompt_logprobs import PromptLogprobs, PromptPlan, score_prompt
from trencadis_torch.rows import Rows

__all__ = ["NO_PROMPTS", "padded_plan", "score_padded"]

NO_PROMPTS = PromptPlan(
    indices=np.empty(0, np.int64),
    positions=np.empty(0, np.int64),
    rows=np.empty(0, np.int64),
    num_top=np.empty(0, np.int64),
    tokens=np.empty(0, np.int64),
)
"""Plan without positions."""


def padded_plan(plan: PromptPlan, num_tokens: int) -> PromptPlan:
    """Return a plan padded to ``num_tokens`` positions; padding scores the start of the first row. Pure.

    Args:
        plan: Plan with P positions.
        num_tokens: Token positions of the bucket, T, at least P.
    """
    padding = num_tokens - len(plan.tokens)
    columns = {
        field.name: np.concatenate([getattr(plan, field.name), np.zeros(padding, np.int64)])
        for field in attrs.fields(PromptPlan)
    }
    return PromptPlan(**columns)


def score_padded(logits: torch.Tensor, padded: PromptPlan, plan: PromptPlan, rows: Rows) -> PromptLogprobs:
    """Score every position of a padded plan, and return the scores of ``plan``.

    Args:
        logits: Logits of every token of the pass, ``[T, V]``.
        padded: Plan from :func:`padded_plan`.
        plan: Plan of the requested positions.
        rows: Rows with the tokens.
    """
    asked = logits.index_select(0, to_device(padded.tokens, logits.device))
    scores = score_prompt(asked, padded, rows, num_top=min(MAX_LOGPROBS, logits.shape[1]))
    return attrs.evolve(scores, plan=plan)
