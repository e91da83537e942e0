"""The words of a group's shared memory: the call that each rank is in, and whether the group was ended."""

from __future__ import annotations

import ctypes
import struct
from typing import Final

import attrs

from trencadis_plugins.executor.collectives.processes import ProcessId
from trencadis_plugins.executor.collectives.segment import ABORT, ENDED, REASON_BYTES, Segment
from trencadis_plugins.executor.collectives.waiting import Futex, fence

__all__ = ["CALLS", "GroupMemory", "RankProgress"]

CALLS: Final = ("", "all_reduce", "all_gather", "broadcast", "send", "receive", "barrier")
_INSIDE: Final = 1


@attrs.frozen(kw_only=True)
class RankProgress:
    """What a rank did last.

    Attributes:
        rank: Rank within the group.
        process: That has this rank; None: it has not opened the group yet.
        num_calls: That it began.
        call: Name of the latest; empty: none yet.
        num_bytes: Size of the call's tensor, in bytes.
        is_inside: Whether it is still in that call.
        is_closed: Whether it closed the group.
    """

    rank: int
    process: ProcessId | None
    num_calls: int
    call: str
    num_bytes: int
    is_inside: bool
    is_closed: bool

    def __str__(self) -> str:
        if self.process is None:
            return f"rank {self.rank}, which has not opened the group"
        latest = f"{self.call} of {self.num_bytes} bytes (call {self.num_calls})"
        if self.is_closed:
            done = "has closed the group"
        elif not self.call:
            done = "has called nothing yet"
        else:
            done = f"is in {latest}" if self.is_inside else f"has called nothing since {latest}"
        state = self.process.state()
        process = f"whose process {self.process.number} {'is stopped' if state == 'stopped' else state}"
        return f"rank {self.rank}, {process}{', and' if state == 'runs' else '; it'} {done}"


class GroupMemory:
    """Words of a segment.

    Attributes:
        layout: Where things are.
        buffer: The whole segment.
        words: It as unsigned numbers of 32 bits; one is read and written at once, by the same instruction as in C.
        longs: It as unsigned numbers of 64 bits.
        futex: Waits for and wakes at its words.
        fence: Memory barrier, or None.
    """

    def __init__(self, segment: Segment) -> None:
        self.layout = segment.layout
        self.buffer = memoryview(segment.mapping)
        self.words = self.buffer.cast("I")
        self.longs = self.buffer.cast("Q")
        self.futex = Futex(ctypes.addressof(ctypes.c_char.from_buffer(segment.mapping)))
        self.fence = fence()

    def begin(self, rank: int, num_calls: int, call: int, num_bytes: int) -> None:
        """Say that a rank begins a call."""
        place = self.layout.progress(rank) // 8
        self.longs[place + 1] = num_bytes
        self.longs[place] = num_calls << 16 | call << 8 | _INSIDE

    def finish(self, rank: int) -> None:
        """Say that a rank's call is over."""
        self.longs[self.layout.progress(rank) // 8] &= ~_INSIDE

    def progress(self, rank: int) -> RankProgress:
        """Return what a rank did last."""
        place = self.layout.progress(rank) // 8
        word, num_bytes = self.longs[place], self.longs[place + 1]
        number, start, namespace, closed = self.longs[(at := self.layout.process(rank) // 8) : at + 4]
        return RankProgress(
            rank=rank,
            process=ProcessId(number, start, namespace) if number else None,
            num_calls=word >> 16,
            call=CALLS[word >> 8 & 255],
            num_bytes=num_bytes,
            is_inside=bool(word & _INSIDE),
            is_closed=bool(closed),
        )

    def join(self, rank: int, process: ProcessId) -> bool:
        """Say which process has a rank; False: another one has it already."""
        place = self.layout.process(rank) // 8
        if self.longs[place]:
            return False
        self.longs[place + 1], self.longs[place + 2] = process.start, process.namespace
        if self.fence is not None:
            self.fence()
        self.longs[place] = process.number
        return True

    def leave(self, rank: int) -> None:
        """Say that a rank closed the group, and let those look who wait for it."""
        self.longs[self.layout.process(rank) // 8 + 3] = 1
        for place in self.layout.stamps:
            self.futex.wake(place)

    def end(self, who: int, reason: str) -> None:
        """Let every waiting and every later call of every rank raise; some microseconds for each word that one may wait for.

        A waiter compares the word that it waits for when it falls asleep, and that is changed here: none falls asleep after having
        looked at the abort word too early. A rank that overwrites its word at the same moment changes it as well. All words are
        changed even if another one aborts: it may have been killed halfway.

        Args:
            who: Rank, or ``size`` for the owner.
            reason: For the others' errors.
        """
        if not self.words[ABORT // 4]:
            text = reason.encode()[:REASON_BYTES]
            struct.pack_into(f"<I{len(text)}s", self.buffer, self.layout.reason(who), len(text), text)
            if self.fence is not None:
                self.fence()
            self.words[ABORT // 4] = who + 1
            if self.fence is not None:
                self.fence()
        for place in self.layout.stamps:
            self.words[place // 4] = ENDED
            self.futex.wake(place)

    def ended(self) -> str:
        """Return which rank or owner ended the group, and why; empty: it was not ended."""
        who = self.words[ABORT // 4] - 1
        if who < 0:
            return ""
        if self.fence is not None:
            self.fence()
        place = self.layout.reason(who)
        text = bytes(self.buffer[place + 4 : place + 4 + self.words[place // 4]]).decode(errors="ignore")
        name = "the executor" if who == self.layout.size else f"rank {who}"
        return f"The group was aborted by {name}{': ' if text else '.'}{text}"
