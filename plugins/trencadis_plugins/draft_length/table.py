"""So many drafts for so many sequences."""

from __future__ import annotations

import bisect

import numpy as np

from trencadis.interfaces import DraftLength, LengthView
from trencadis.records import Int32Array
from trencadis_plugins.draft_length.config import TableConfig
from trencadis_plugins.draft_length.sizes import read_sizes

__all__ = ["Table"]


class Table(DraftLength):
    """Looks the length up by the number of decoding sequences; beyond the last range nothing is drafted.

    Source: vLLM's draft lengths by batch size, ranges of sequences with a number of drafts each.

    Args:
        config: The ranges.
    """

    def __init__(self, config: TableConfig | None = None) -> None:
        ranges = read_sizes((config or TableConfig()).sizes)
        self._ends = [last for _, last, _ in ranges]
        self._drafts = [*(drafts for _, _, drafts in ranges), 0]

    def choose(self, view: LengthView) -> Int32Array:
        """Return the length of the range that ``view.num_running`` is in, cut to each sequence's limit."""
        most = self._drafts[bisect.bisect_left(self._ends, view.num_running)]
        return np.minimum(view.max_draft_tokens, most).astype(np.int32)
