"""ARC: adaptive balance between recency and frequency."""

from __future__ import annotations

from trencadis.interfaces import plain_state
from trencadis_plugins.eviction.candidates import Candidates
from trencadis_plugins.eviction.history import History
from trencadis_plugins.eviction.tracking import TrackingPolicy

__all__ = ["Arc"]


@plain_state
class Arc(TrackingPolicy):
    """Keeps two lists, contents used once and contents used more often, each by last use, and adapts their sizes.

        enter ──▶ once  ──used again──▶ often           target: contents that "once" may hold
                   │                      │             a remembered one of "once" comes back: target up
                   └▶ remembered          └▶ remembered    one of "often" comes back: target down

    O(log n) a block.

    Source: Megiddo and Modha, "ARC", FAST 2003, figure 4; eviction comes in lots here, so what is remembered is trimmed with each.
    """

    def __init__(self) -> None:
        super().__init__()
        self._target = 0.0
        self._is_once: set[int] = set()
        self._once = Candidates()
        self._often = Candidates()
        self._num_often = 0
        self._once_remembered: History[bool] = History()
        self._often_remembered: History[bool] = History()

    def enter(self, block: int, key: bytes, depth: int, salt: str) -> None:
        """Add to the contents used once; one with a ghost entry is added to the others, and sizes adapt."""
        num_once, num_often = len(self._once_remembered), len(self._often_remembered)
        if self._once_remembered.recall(key):
            self._target = min(self.capacity, self._target + max(1.0, num_often / num_once))
        elif self._often_remembered.recall(key):
            self._target = max(0.0, self._target - max(1.0, num_once / num_often))
        else:
            self._is_once.add(block)
            return
        self._num_often += 1

    def reuse(self, block: int) -> None:
        """Move to the contents used more often."""
        if block in self._is_once:
            self._is_once.discard(block)
            self._num_often += 1

    def offer(self, block: int) -> None:
        """Append to its list."""
        (self._once if block in self._is_once else self._often).add(block)

    def withdraw(self, block: int) -> None:
        """Remove the candidate."""
        self._once.discard(block)
        self._often.discard(block)

    def choose(self) -> int:
        """Return the oldest block of the list that exceeds its size."""
        from_once = bool(self._once) and (len(self._is_once) > self._target or not self._often)
        return (self._once if from_once else self._often).take()

    def leave(self, block: int, key: bytes, *, evicted: bool) -> None:
        """Add a ghost entry for an evicted content."""
        is_once = block in self._is_once
        if is_once:
            self._is_once.discard(block)
        else:
            self._num_often -= 1
        if evicted:
            (self._once_remembered if is_once else self._often_remembered).remember(key, True, most=2 * self.capacity)
            self._once_remembered.shrink(max(0, self.capacity - len(self._is_once)))
            used = len(self._is_once) + self._num_often + len(self._once_remembered)
            self._often_remembered.shrink(max(0, 2 * self.capacity - used))
