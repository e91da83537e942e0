"""Counts of what torch.compile gives up, read from its own counters.

Source of their names: PyTorch 2.13, ``torch/_dynamo/exc.py`` and ``convert_frame.py``.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["DynamoCounts", "most_compiled"]


class DynamoCounts:
    """Graph breaks and limits hit in this process since the object was made."""

    def __init__(self) -> None:
        self._before = _counts()

    @property
    def num_graph_breaks(self) -> int:
        """Places at which a graph ended early."""
        return _counts()[0] - self._before[0]

    @property
    def num_limit_hits(self) -> int:
        """Calls that run uncompiled, as their code has too many graphs."""
        return _counts()[1] - self._before[1]


def most_compiled() -> int:
    """Return how many graphs one piece of code has had in this process, at most: dropped ones count, too."""
    convert_frame: Any = sys.modules.get("torch._dynamo.convert_frame")
    return 0 if convert_frame is None else max(convert_frame.FRAME_COMPILE_COUNTER.values(), default=0)


def _counts() -> tuple[int, int]:
    utils: Any = sys.modules.get("torch._dynamo.utils")
    if utils is None:  # nothing was compiled
        return 0, 0
    failed = utils.counters["unimplemented"]
    limits = sum(number for reason, number in failed.items() if reason.startswith("Dynamo recompile limit exceeded"))
    return sum(utils.counters["graph_break"].values()), limits
