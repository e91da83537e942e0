"""The same number of drafts, whatever happens."""

from __future__ import annotations

import numpy as np

from trencadis.interfaces import DraftLength, LengthView
from trencadis.records import Int32Array
from trencadis_plugins.draft_length.config import FixedConfig

__all__ = ["Fixed"]


class Fixed(DraftLength):
    """Asks for one number of drafts, cut to what each sequence may have.

    Args:
        config: Which.
    """

    def __init__(self, config: FixedConfig | None = None) -> None:
        self._most = (config or FixedConfig()).num_draft_tokens

    def choose(self, view: LengthView) -> Int32Array:
        """Return that number, or each sequence's limit."""
        if not self._most:
            return view.max_draft_tokens
        return np.minimum(view.max_draft_tokens, self._most).astype(np.int32)

    def rest(self) -> int:
        """Return a number that no sequence reaches: the lengths do not change."""
        return 1 << 30
