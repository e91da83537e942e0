"""Graph breaks of torch.compile, from its own list and counters.

The list has graphs that end early, with source line and reason; the counter has code without any graph, by reason.

Source of their names: PyTorch 2.13, ``torch/_dynamo/output_graph.py``, ``exc.py`` and ``convert_frame.py``.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from trencadis.faults import cut

__all__ = ["DynamoCounts", "in_one_line", "most_compiled"]

_LIMIT = "Dynamo recompile limit exceeded"
_MAX_REASON = 400


class DynamoCounts:
    """Graph breaks and limits that compiled functions have hit in this process since the object was made."""

    def __init__(self) -> None:
        self._num_broken = len(_broken())
        self._uncompiled = Counter(_uncompiled())

    @property
    def num_graph_breaks(self) -> int:
        """Number of graphs that ended early, and of pieces of code without a graph."""
        without = sum(number for reason, number in self._new_uncompiled().items() if not reason.startswith(_LIMIT))
        return len(self._new_broken()) + without

    @property
    def num_limit_hits(self) -> int:
        """Number of times that code was not compiled because it had too many graphs."""
        return sum(number for reason, number in self._new_uncompiled().items() if reason.startswith(_LIMIT))

    def breaks(self) -> dict[str, int]:
        """Return the number of graph breaks by place and reason, in one line. Takes about 1 µs without any."""
        found = Counter(f"{_place(one.user_stack)}{in_one_line(one.reason)}" for one in self._new_broken())
        for reason, number in self._new_uncompiled().items():
            found[in_one_line(reason)] += number
        return dict(found)

    def _new_broken(self) -> Sequence[Any]:
        listed = _broken()
        # torch._dynamo.reset() may have emptied the list.
        return listed[self._num_broken :] if len(listed) >= self._num_broken else listed

    def _new_uncompiled(self) -> Counter[str]:
        return Counter(_uncompiled()) - self._uncompiled


def most_compiled() -> int:
    """Return the maximum number of graphs that one piece of code has had in this process, dropped ones included."""
    convert_frame: Any = sys.modules.get("torch._dynamo.convert_frame")
    return 0 if convert_frame is None else max(convert_frame.FRAME_COMPILE_COUNTER.values(), default=0)


def _broken() -> Sequence[Any]:
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return () if utils is None else utils.graph_break_reasons  # None if nothing was compiled


def _uncompiled() -> dict[str, int]:
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return {} if utils is None else utils.counters["unimplemented"]


def _place(stack: Sequence[Any]) -> str:
    """Return the innermost source line at which a graph ended, with a colon; empty if unknown."""
    return f"{stack[-1].filename}:{stack[-1].lineno} ({stack[-1].name}): " if stack else ""


def in_one_line(reason: str) -> str:
    """Return a reason, with the place of an error, without the advice and links that torch.compile appends. Pure."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    details = [line.partition(": ")[2] for line in lines if line.startswith("Developer debug context: ")]
    details = details or [line.partition(": ")[2] for line in lines if line.startswith("Explanation: ")] or lines[1:2]
    # The message of an operation that raised begins with its arguments, which can be long.
    said = [*lines[:1], *(detail.rpartition(": got ")[2] for detail in details)]
    places = [line for line in lines if line.startswith('File "')]
    return cut(": ".join(part.rstrip(":") for part in said) or "no reason given", _MAX_REASON) + "".join(
        f" ({place})" for place in places[-1:]
    )
