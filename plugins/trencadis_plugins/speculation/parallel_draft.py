"""Drafts from one forward of a model that was taught to guess several tokens ahead.

    text … 7 8 │ mask mask mask      after 8 the model says what follows, after each mask what follows that
    drafts       d1   d2   d3   d4

A mask does not see the drafts before it, only other masks; the distribution of each draft is known all the same, so nothing changes for
those who verify. Keys and values of the masks are overwritten by those of the text.

Source: An et al., "PARD: accelerating LLM inference with low-cost parallel draft model adaptation", arXiv 2504.18583.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from trencadis.errors import ConfigValueError
from trencadis.interfaces import ComponentContext
from trencadis.records import BoolArray, BucketLimits
from trencadis_plugins.speculation.draft_asked import Asked, read_linear
from trencadis_plugins.speculation.draft_base import DraftingModel
from trencadis_plugins.speculation.draft_config import ParallelDraftConfig
from trencadis_plugins.speculation.draft_sampler import Guesses

__all__ = ["ParallelDraft"]


class ParallelDraft(DraftingModel):
    """Guesses all drafts of a step at once.

    Args:
        config: Table of the component.
        context: Makes the backend and finds the model.
    """

    def __init__(self, config: ParallelDraftConfig, context: ComponentContext) -> None:
        super().__init__(config, context)
        self._mask = config.mask_token_id

    def _prepare(self, path: str, closed: BoolArray) -> None:
        if self._mask < 0:
            self._mask = _mask_token(path)
        if self._mask >= len(closed):
            raise ConfigValueError(
                f"[speculation.parallel_draft] mask_token_id = {self._mask}: the model has {len(closed)} tokens.",
                hint="Give the token that the model was taught to guess after.",
            )
        closed[self._mask] = True

    def _most_query(self, limits: BucketLimits) -> int:
        # The drafts of the last step, one token more, and the masks.
        return max(1 + limits.max_draft_tokens, 2 * self.max_draft_tokens)

    def _leave(self, num_sequences: int) -> int:
        return max(1, self.ready.most_query - (self.max_draft_tokens - 1))

    def _guess(self, asked: Sequence[Asked]) -> None:
        masks = np.full(self.max_draft_tokens, self._mask, np.int32)
        self.ready.runner.run([one.query(masks[: one.count - 1]) for one in asked])

    def _read(self, asked: Sequence[Asked], taken: Sequence[Guesses]) -> None:
        read_linear(asked, taken)
        for one in asked:
            one.held.tokens = one.tokens


def _mask_token(path: str) -> int:
    """Return the mask token that a model's own configuration names.

    Raises:
        ConfigValueError: It names none.
    """
    settings = Path(path) / "config.json"
    found = json.loads(settings.read_text(encoding="utf-8")).get("mask_token_id") if settings.is_file() else None
    if not isinstance(found, int) or found < 0:
        raise ConfigValueError(
            f'[speculation.parallel_draft] model = "{path}": its config.json names no mask_token_id.',
            hint="Set mask_token_id, or name a model that was taught to guess ahead.",
        )
    return found
