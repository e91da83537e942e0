"""Cost-aware policy: loads a prefix if that is predicted to be faster than computing it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trencadis_kv.interfaces import KVPolicy, LoadView, SaveView, SourceView
from trencadis_kv.policies.config import CostAwareConfig

__all__ = ["CostAware"]


class CostAware(KVPolicy):
    """Never waits longer for a load than a share of the time that computing would take.

    A load whose time cannot be predicted is tried: with that deadline if the time to compute is known, else until the
    timeout.

    Args:
        config: Table ``[kv_policy.cost_aware]``; None: the defaults.
    """

    def __init__(self, config: CostAwareConfig | None = None) -> None:
        self._config = config or CostAwareConfig()

    def admits_save(self, view: SaveView) -> int:
        """Return all blocks, or none while staging is nearly full."""
        return 0 if view.staged_fraction > self._config.max_staged_fraction else view.num_blocks

    def admits_load(self, view: LoadView) -> float:
        """Return the longest wait, a share of the time to compute, seconds; 0 if the load is predicted to take longer."""
        if math.isnan(view.compute_s):
            return view.timeout_s
        longest_s = self._config.max_load_fraction * view.compute_s
        # A comparison with nan is false: a load without measurements is tried.
        return 0.0 if view.load_s > longest_s else min(longest_s, view.timeout_s)

    def choose_source(self, sources: Sequence[SourceView]) -> int:
        """Return the source with which the prefix is complete first: loaded, and computed where the source has less than others."""
        longest_s = max(source.compute_s for source in sources)
        finish_s = [source.load_s + longest_s - source.compute_s for source in sources]
        if any(map(math.isnan, finish_s)):
            return super().choose_source(sources)
        return min(range(len(sources)), key=finish_s.__getitem__)
