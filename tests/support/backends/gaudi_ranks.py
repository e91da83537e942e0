"""Ranks of the backend ``gaudi`` as threads, each with an emulated device of its own."""

from __future__ import annotations

from typing import Any

import transformers  # noqa: F401 - its lazy imports are not made for several threads at once

from support.backends.rank_threads import RankedBackend
from trencadis.clock import SystemClock
from trencadis_gaudi.backend import GaudiBackend
from trencadis_gaudi.config import GaudiConfig

__all__ = ["MADE", "make_gaudi", "ranked_gaudi"]

MADE: list[RankedBackend] = []
"""What ``ranked_gaudi`` returned, for tests of engines that name it by its path; they take theirs out."""


def make_gaudi(**options: Any) -> GaudiBackend:
    """Return one rank before it joins, in lazy mode and unchecked unless asked otherwise."""
    config = GaudiConfig(**{"device": "emulated", "mode": "lazy", "check_model": False, **options})
    return GaudiBackend(config, clock=SystemClock())


def ranked_gaudi(size: int = 2, *, expert: int = 1, **options: Any) -> RankedBackend:
    """Return a backend of several ranks."""
    MADE.append(RankedBackend(lambda: make_gaudi(**options), size, expert=expert))
    return MADE[-1]
