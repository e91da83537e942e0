"""Blocks of finished prefills, kept for the engine that goes on with them.

A hold ends when the other engine releases it, when its lease is over, or at the latest after ``max_hold_s``; blocks are given back once
nobody reads them. A reader that would keep them longer loses its connection.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping

import attrs

from trencadis.clock import Clock
from trencadis.errors import TransferError
from trencadis.records import TransferCause

__all__ = ["Hold", "Holds"]


@attrs.define(kw_only=True, eq=False)
class Hold:
    """Blocks of one finished prefill.

    Attributes:
        transfer_id: That the engine knows it by.
        name: That other engines know it by; nobody can guess it.
        index: Block ids by block hash.
        num_bytes: Of all blocks.
        expires_s: End of the lease, engine clock.
        ends_s: When it ends at the latest.
        is_over: It was released, or its time is up.
        readers: Cuts the connection of each who reads.
    """

    transfer_id: int
    name: str
    index: Mapping[bytes, int]
    num_bytes: int
    expires_s: float
    ends_s: float
    is_over: bool = False
    readers: list[Callable[[], None]] = attrs.Factory(list)


class Holds:
    """The books of one producer. From any thread.

    Args:
        clock: Source of time.
        lease_s: Of a hold, and of its renewal.
        max_hold_s: Longest time of a hold.
        max_bytes: Of all holds.

    Attributes:
        ends: How holds ended: ``released`` or ``expired``; and those that were ``refused`` for want of room.
    """

    def __init__(self, clock: Clock, *, lease_s: float, max_hold_s: float, max_bytes: int) -> None:
        self._clock = clock
        self._lease_s = lease_s
        self._max_hold_s = max_hold_s
        self._max_bytes = max_bytes
        self._by_name: dict[str, Hold] = {}
        self._num_bytes = 0
        self._lock = threading.Lock()
        self.ends: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        """Held now."""
        return self._num_bytes

    @property
    def num_holds(self) -> int:
        """Prefills that are held now."""
        return len(self._by_name)

    def add(self, transfer_id: int, name: str, index: Mapping[bytes, int], *, num_bytes: int) -> bool:
        """Hold blocks; False if there is no room for so many bytes."""
        with self._lock:
            if self._num_bytes + num_bytes > self._max_bytes:
                self.ends["refused"] += 1
                return False
            now_s = self._clock.now_s()
            ends_s = now_s + self._max_hold_s
            self._by_name[name] = Hold(
                transfer_id=transfer_id,
                name=name,
                index=index,
                num_bytes=num_bytes,
                expires_s=min(ends_s, now_s + self._lease_s),
                ends_s=ends_s,
            )
            self._num_bytes += num_bytes
            return True

    def open(self, name: str, cut: Callable[[], None]) -> Hold:
        """Return a hold that a reader begins to read; its blocks stay until :meth:`close`.

        Args:
            name: Of the hold.
            cut: Called if it reads for too long; does not wait.

        Raises:
            TransferError: ``lost``: there is none, or not any more.
        """
        with self._lock:
            hold = self._by_name.get(name)
            if hold is None or hold.is_over:
                raise TransferError("The blocks are not held any more.", cause=TransferCause.LOST)
            hold.readers.append(cut)
            return hold

    def close(self, hold: Hold, cut: Callable[[], None]) -> None:
        """Called when a reader is done."""
        with self._lock:
            hold.readers.remove(cut)
            hold.expires_s = min(hold.ends_s, self._clock.now_s() + self._lease_s)

    def renew(self, name: str) -> bool:
        """Let a lease begin anew; False if there is no such hold."""
        with self._lock:
            hold = self._by_name.get(name)
            if hold is None or hold.is_over:
                return False
            hold.expires_s = min(hold.ends_s, self._clock.now_s() + self._lease_s)
            return True

    def release(self, name: str) -> bool:
        """End a hold; False if there is no such hold."""
        with self._lock:
            hold = self._by_name.get(name)
            if hold is None or hold.is_over:
                return False
            self._end(hold, "released")
            return True

    def take_free(self) -> tuple[int, ...]:
        """Return and forget the transfer ids of holds that are over and that are not read; called every step."""
        if not self._by_name:
            return ()
        now_s = self._clock.now_s()
        with self._lock:
            for hold in self._by_name.values():
                if now_s >= hold.ends_s or (now_s >= hold.expires_s and not hold.readers):
                    if not hold.is_over:
                        self._end(hold, "expired")
                    for cut in hold.readers:
                        cut()
            free = [hold for hold in self._by_name.values() if hold.is_over and not hold.readers]
            for hold in free:
                del self._by_name[hold.name]
                self._num_bytes -= hold.num_bytes
            return tuple([hold.transfer_id for hold in free])

    def _end(self, hold: Hold, how: str) -> None:
        hold.is_over = True
        self.ends[how] += 1
