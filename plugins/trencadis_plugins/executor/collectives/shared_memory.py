"""Sums, gathers and messages between processes of one machine, through memory that all of them map.

A call is cut into chunks. Of each chunk a rank

    1. waits until every rank has come to the chunk before, and so has read the one before that: its slot is free
    2. copies its part into its slot, of which it has two that take turns
    3. stamps: the number of the chunk, into a word of its own, and wakes who sleeps there
    4. waits for the stamps of those whose part it needs
    5. reads their slots, summing in the order of ranks

One stamp per chunk is enough, for two slots: a rank that has come to chunk n has read all of chunk n - 1. A broadcast's source skips
step 4, and meets the others in step 1 of its next call.

Memory order: what is written in step 2 must be seen by whoever sees the stamp of step 3, and what is read in step 5 must have been
read before the stamp of the next chunk is seen. x86 keeps stores in order, and loads, and does not move a store before a load. On
other processors ``fence`` stands before each stamp is written and after it was seen; see ``waiting``. A stamp is an aligned word of 32
bits, so it is never seen half written.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

import torch

from trencadis.errors import CollectiveError
from trencadis.interfaces import Collective
from trencadis_plugins.executor.collectives.group_memory import CALLS, GroupMemory, RankProgress
from trencadis_plugins.executor.collectives.processes import this_process
from trencadis_plugins.executor.collectives.segment import ABORT, FIRST_STAMP, MAILBOX_SLOTS, Segment
from trencadis_plugins.executor.collectives.sums import ordered_sum, require_summable
from trencadis_plugins.executor.collectives.waiting import Patience

__all__ = ["SharedMemoryCollective"]

T = TypeVar("T")

_MASK: Final = 2**31 - 1
_HALF: Final = 2**30
_CHECK_S: Final = 0.2
"""A rank that sleeps looks so often whether the one it waits for still runs."""
_SLICED_BYTES: Final = 128 * 1024
"""Three ranks and more sum larger chunks in slices, one each: every rank reads two chunks instead of one from each rank."""
_MOST_VIEWS: Final = 512
"""Shapes whose views are kept."""
_DTYPES: Final = tuple(
    getattr(torch, name)
    for name in (
        *("float32", "float64", "bfloat16", "float16", "int8", "int16", "int32", "int64", "uint8", "bool"),
        *("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128"),
    )
)
_CODES: Final = {dtype: code for code, dtype in enumerate(_DTYPES)}
_NOTHING: Final = torch.empty(0)
_REDUCE, _GATHER, _BROADCAST, _SEND, _RECEIVE, _BARRIER = range(1, 7)


class SharedMemoryCollective(Collective):
    """One rank's end of a group in shared memory; tensors are on the CPU.

    A rank that ended is noticed within 0.2 s by those who wait for it, one that stopped after ``timeout_s``; either ends the group for
    all ranks, as a call that differs from those of the others does.

    Args:
        segment: Segment of the group; not used elsewhere in this process.
        rank: Place in the group.
        timeout_s: For which a rank waits for another, in each chunk of a call.
        patience: For how long it looks before it sleeps.

    Raises:
        CollectiveError: The rank is taken already.
    """

    def __init__(self, segment: Segment, rank: int, *, timeout_s: float, patience: Patience) -> None:
        layout = segment.layout
        self.rank = rank
        self.size = layout.size
        self._timeout_s = timeout_s
        self._patience = patience
        self._memory: GroupMemory | None = GroupMemory(segment)
        with torch.inference_mode(False):  # what is made in that mode cannot be written to outside
            self._bytes: torch.Tensor | None = torch.frombuffer(segment.mapping, dtype=torch.uint8)
        self._layout = layout
        self._others = tuple(other for other in range(self.size) if other != rank)
        self._arrived = tuple(layout.arrived(other) for other in range(self.size))
        self._summed = tuple(layout.summed(other) for other in range(self.size))
        self._headers = tuple(
            tuple(layout.header(other, parity) // 8 for other in range(self.size)) for parity in (0, 1)
        )
        self._views: dict[tuple[torch.dtype, torch.Size], tuple[tuple[torch.Tensor, ...], ...]] = {}
        self._stamp = self._met = FIRST_STAMP
        self._heads = dict.fromkeys(self._others, FIRST_STAMP)
        self._tails = dict.fromkeys(self._others, FIRST_STAMP)
        self._num_calls = 0
        self._what = (0, 0)
        if not self._memory.join(rank, this_process()):
            raise CollectiveError(f"Rank {rank} of the group is taken already, by {self._memory.progress(rank)}.")

    # ------------------------------------------------------------------------------------------------- the contract

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by the sum of the ranks', in the order of ranks."""
        require_summable(tensor)
        self._run(_REDUCE, tensor, self._reduce)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks along the last dimension."""
        if tensor.dim() == 0:
            raise CollectiveError("all_gather needs a tensor of at least one dimension.")
        return self._run(_GATHER, tensor, self._gather, detail=tensor.shape[-1])

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0) -> None:
        """Overwrite a tensor with that of one rank; the source returns when its last chunks are in its slots."""
        self._require_rank(source, "broadcast from")
        _require_contiguous("broadcast", tensor)
        self._run(_BROADCAST, tensor, lambda part: self._broadcast(part, source), detail=source)

    def send(self, tensor: torch.Tensor, *, target: int) -> None:
        """Put a tensor into the mailbox of this pair, which holds four chunks; waits while it is full."""
        self._require_other(target, "send to")
        self._run(_SEND, tensor, lambda part: self._send(part, target), detail=target)

    def receive(self, tensor: torch.Tensor, *, source: int) -> None:
        """Take the next tensor out of the mailbox of this pair."""
        self._require_other(source, "receive from")
        _require_contiguous("receive", tensor)
        self._run(_RECEIVE, tensor, lambda part: self._receive(part, source), detail=source)

    def barrier(self) -> None:
        """Return when every rank is here."""
        self._run(_BARRIER, _NOTHING, lambda _part: self._meet())

    def abort(self, reason: str = "") -> None:
        """Let every waiting and every later call of all ranks raise."""
        memory = self._memory
        if memory is not None:
            memory.end(self.rank, reason)

    def close(self) -> None:
        """Say that this rank is gone, and unmap."""
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.leave(self.rank)
        self._bytes = None
        self._views.clear()

    def progress(self) -> tuple[RankProgress, ...]:
        """Return what each rank did last; from any thread.

        Raises:
            CollectiveError: The group is closed.
        """
        memory = self._open()
        return tuple(memory.progress(rank) for rank in range(self.size))

    # ------------------------------------------------------------------------------------------------- chunks

    def _run(self, call: int, tensor: torch.Tensor, work: Callable[[torch.Tensor], T], detail: int = 0) -> T:
        """Make a call; whatever leaves it halfway ends the group, for its stamps are no longer those of the others."""
        memory = self._open()
        if tensor.device.type != "cpu":
            raise CollectiveError(f"Collectives in shared memory take tensors of the CPU, not of {tensor.device}.")
        code = _CODES.get(tensor.dtype)
        if code is None:
            raise CollectiveError(f"Collectives in shared memory do not know {tensor.dtype}.")
        num_bytes = tensor.numel() * tensor.element_size()
        self._num_calls += 1
        # Send and receive are one message.
        self._what = (_SEND if call == _RECEIVE else call) | code << 8 | num_bytes << 16, detail
        memory.begin(self.rank, self._num_calls, call, num_bytes)
        try:
            return work(tensor)
        except CollectiveError:
            raise
        except BaseException as error:
            memory.end(
                self.rank, f"it left {CALLS[call]} (call {self._num_calls}) with {type(error).__name__}: {error}"
            )
            raise
        finally:
            memory.finish(self.rank)

    def _reduce(self, tensor: torch.Tensor) -> None:
        for number, piece in enumerate(_pieces(tensor, self._layout.slot_bytes)):
            slots = self._meet(piece, is_first=not number)
            if self.size > 2 and piece.numel() * piece.element_size() >= _SLICED_BYTES:
                self._sum_sliced(piece, slots)
            else:
                ordered_sum(slots, piece)

    def _sum_sliced(self, piece: torch.Tensor, slots: Sequence[torch.Tensor]) -> None:
        """Sum one slice of a chunk, in the order of ranks, in this rank's slot; copy the others' from theirs."""
        memory, stamp = self._open(), self._stamp
        flat = piece.view(-1)
        ends = [flat.numel() * rank // self.size for rank in range(self.size + 1)]
        parts = [slot.view(-1)[ends[self.rank] : ends[self.rank + 1]] for slot in slots]
        ordered_sum(parts, parts[self.rank])
        self._write_stamp(memory, self._summed[self.rank], stamp)
        self._await(memory, self._others, self._summed, stamp)
        for rank, slot in enumerate(slots):
            flat[ends[rank] : ends[rank + 1]] = slot.view(-1)[ends[rank] : ends[rank + 1]]

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        most = self._layout.slot_bytes // tensor.element_size()
        if tensor.numel() <= most:
            return torch.cat(self._meet(tensor), dim=-1)
        width = tensor.shape[-1]
        rows = tensor.reshape(-1, width)
        out = tensor.new_empty((rows.shape[0], self.size, width))
        for number, (of_rows, of_columns) in enumerate(_rectangles(rows.shape[0], width, most)):
            slots = self._meet(rows[of_rows, of_columns], is_first=not number)
            for rank, slot in enumerate(slots):
                out[of_rows, rank, of_columns] = slot
        return out.view((*tensor.shape[:-1], self.size * width))

    def _broadcast(self, tensor: torch.Tensor, source: int) -> None:
        for number, piece in enumerate(_pieces(tensor, self._layout.slot_bytes)):
            if source == self.rank:
                self._meet(piece, awaited=())
            else:
                slots = self._meet(shape=piece, awaited=(source,), is_first=not number)
                piece.copy_(slots[source])

    def _meet(
        self,
        part: torch.Tensor | None = None,
        *,
        shape: torch.Tensor | None = None,
        awaited: tuple[int, ...] | None = None,
        is_first: bool = True,
    ) -> tuple[torch.Tensor, ...]:
        """Do steps 1 to 4 of a chunk.

        Args:
            part: That this rank puts into its slot; None: nothing.
            shape: Shape of the tensors that other ranks put into their parts, if ``part`` is None.
            awaited: Ranks whose parts are needed; None: all.
            is_first: Whether it is the call's first chunk, where calls are compared.

        Returns:
            The slots of all ranks, as tensors like ``part``; none without one.
        """
        memory = self._open()
        before, stamp = self._stamp, (self._stamp + 1) & _MASK
        parity = stamp & 1
        if self._met != before:
            self._await(memory, self._others, self._arrived, before)
        like = shape if part is None else part
        slots = () if like is None else self._slots(like)[parity]
        if part is not None:
            slots[self.rank].copy_(part)
        header = self._headers[parity][self.rank]
        memory.longs[header], memory.longs[header + 1] = self._what
        self._stamp = stamp
        self._write_stamp(memory, self._arrived[self.rank], stamp)
        self._await(memory, self._others if awaited is None else awaited, self._arrived, stamp)
        if awaited is None:
            self._met = stamp
        if is_first:
            self._compare(memory, self._others if awaited is None else awaited, self._headers[parity])
        return slots

    def _slots(self, like: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], ...]:
        """Return slots of both parities and all ranks as tensors of a shape and dtype."""
        key = like.dtype, like.shape
        found = self._views.get(key)
        if found is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            places = [[self._layout.slot(rank, parity) for rank in range(self.size)] for parity in (0, 1)]
            found = tuple(tuple(self._view(place, like) for place in of_parity) for of_parity in places)
            self._views[key] = found
        return found

    def _view(self, place: int, like: torch.Tensor) -> torch.Tensor:
        """Return bytes of the segment as a tensor of a shape and dtype."""
        assert self._bytes is not None
        with torch.inference_mode(False):
            return self._bytes[place : place + like.numel() * like.element_size()].view(like.dtype).view(like.shape)

    # ------------------------------------------------------------------------------------------------- messages

    def _send(self, tensor: torch.Tensor, target: int) -> None:
        memory, layout = self._open(), self._layout
        for number, piece in enumerate(_pieces(tensor.contiguous(), layout.mailbox_slot_bytes)):
            stamp = (self._heads[target] + 1) & _MASK
            free = {target: layout.tail(self.rank, target)}
            self._await(memory, (target,), free, (stamp - MAILBOX_SLOTS) & _MASK)
            message_header = layout.message_header(self.rank, target, stamp) // 8
            memory.longs[message_header], memory.longs[message_header + 1] = self._what[0], number
            self._view(layout.mailbox_slot(self.rank, target, stamp), piece).copy_(piece)
            self._heads[target] = stamp
            self._write_stamp(memory, layout.head(self.rank, target), stamp)

    def _receive(self, tensor: torch.Tensor, source: int) -> None:
        memory, layout = self._open(), self._layout
        for number, piece in enumerate(_pieces(tensor, layout.mailbox_slot_bytes)):
            stamp = (self._tails[source] + 1) & _MASK
            self._await(memory, (source,), {source: layout.head(source, self.rank)}, stamp)
            message_header = layout.message_header(source, self.rank, stamp) // 8
            sent = memory.longs[message_header], memory.longs[message_header + 1]
            if sent != (self._what[0], number):
                self._fail(
                    memory,
                    f"Rank {source} sent rank {self.rank} {_described(sent[0], None)}, and rank {self.rank} expects "
                    f"{_described(self._what[0], None)}.",
                )
            piece.copy_(self._view(layout.mailbox_slot(source, self.rank, stamp), piece))
            self._tails[source] = stamp
            self._write_stamp(memory, layout.tail(source, self.rank), stamp)

    # ------------------------------------------------------------------------------------------------- waiting

    def _write_stamp(self, memory: GroupMemory, place: int, stamp: int) -> None:
        if memory.fence is not None:
            memory.fence()
        memory.words[place // 4] = stamp
        memory.futex.wake(place)
        # An abort that came between looking and writing found the old value, and this has replaced its mark.
        if memory.words[ABORT // 4]:
            raise CollectiveError(memory.ended())

    def _await(
        self, memory: GroupMemory, ranks: tuple[int, ...], places: Sequence[int] | dict[int, int], stamp: int
    ) -> None:
        """Wait until words of ranks have reached a stamp."""
        words = memory.words
        for rank in ranks:
            if not _reached(words[places[rank] // 4], stamp) and not self._looks(words, places[rank] // 4, stamp):
                self._sleep(memory, ranks, rank, places, stamp)
        if memory.fence is not None:
            memory.fence()

    def _looks(self, words: memoryview[int], index: int, stamp: int) -> bool:
        for _ in range(self._patience.spins):
            if _reached(words[index], stamp):
                return True
        for _ in range(self._patience.yields):
            os.sched_yield()
            if _reached(words[index], stamp):
                return True
        return False

    def _sleep(
        self,
        memory: GroupMemory,
        ranks: tuple[int, ...],
        rank: int,
        places: Sequence[int] | dict[int, int],
        stamp: int,
    ) -> None:
        words, place = memory.words, places[rank]
        deadline_s = time.monotonic() + self._timeout_s
        while not _reached(value := words[place // 4], stamp):
            if words[ABORT // 4]:
                raise CollectiveError(memory.ended())
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                late = [other for other in ranks if not _reached(words[places[other] // 4], stamp)]
                waited = f"Rank {self.rank} waited {self._timeout_s:g} s in {self._call()} for "
                self._fail(memory, waited + "; ".join(str(memory.progress(other)) for other in late) + ".")
            was_woken = memory.futex.wait(place, value, min(left_s, _CHECK_S))
            progress = memory.progress(rank)
            is_gone = progress.is_closed or (
                not was_woken and progress.process is not None and progress.process.state() == "ended"
            )
            if is_gone and memory.fence is not None:
                memory.fence()
            if is_gone and words[place // 4] == value:
                self._fail(memory, f"Rank {self.rank} waits in {self._call()} for {progress}.")

    def _compare(self, memory: GroupMemory, ranks: tuple[int, ...], headers: Sequence[int]) -> None:
        for rank in ranks:
            theirs = memory.longs[headers[rank]], memory.longs[headers[rank] + 1]
            if theirs != self._what:
                self._fail(
                    memory,
                    f"Rank {self.rank} calls {_described(*self._what)} where rank {rank} calls {_described(*theirs)} "
                    f"(call {self._num_calls}).",
                )

    def _fail(self, memory: GroupMemory, said: str) -> None:
        memory.end(self.rank, said)
        raise CollectiveError(said)

    def _call(self) -> str:
        memory = self._open()
        found = memory.progress(self.rank)
        return f"{found.call} of {found.num_bytes} bytes (call {found.num_calls})"

    # ------------------------------------------------------------------------------------------------- checks

    def _open(self) -> GroupMemory:
        if self._memory is None:
            raise CollectiveError(f"Rank {self.rank} has closed the group.")
        return self._memory

    def _require_rank(self, rank: int, said: str) -> None:
        if not 0 <= rank < self.size:
            raise CollectiveError(
                f"Rank {self.rank} cannot {said} rank {rank}: the group has ranks 0 to {self.size - 1}."
            )

    def _require_other(self, rank: int, said: str) -> None:
        self._require_rank(rank, said)
        if rank == self.rank:
            raise CollectiveError(f"Rank {rank} cannot {said} itself.")


def _reached(value: int, stamp: int) -> bool:
    """Return whether a word shows a stamp or a later one; never once the group was aborted. Pure."""
    return value <= _MASK and (value - stamp) & _MASK < _HALF


def _require_contiguous(call: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise CollectiveError(
            f"{call} needs a contiguous tensor, not strides {tensor.stride()} of {tuple(tensor.shape)}."
        )


def _pieces(tensor: torch.Tensor, most_bytes: int) -> Iterator[torch.Tensor]:
    """Yield a contiguous tensor in pieces that fit a slot, at least one."""
    most = most_bytes // tensor.element_size()
    if tensor.numel() <= most:
        yield tensor
        return
    flat = tensor.view(-1)
    for start in range(0, flat.numel(), most):
        yield flat[start : start + most]


def _rectangles(num_rows: int, width: int, most: int) -> Iterator[tuple[slice, slice]]:
    """Yield rows and columns of rectangles that fit a slot and cover ``[num_rows, width]``: whole rows if a row fits. Pure."""
    if width <= most:
        step = most // width
        for row in range(0, num_rows, step):
            yield slice(row, min(row + step, num_rows)), slice(0, width)
        return
    for row in range(num_rows):
        for column in range(0, width, most):
            yield slice(row, row + 1), slice(column, min(column + most, width))


def _described(what: int, detail: int | None) -> str:
    """Return a header in words. Pure."""
    call, dtype, num_bytes = CALLS[what & 255], _DTYPES[what >> 8 & 255], what >> 16
    if call == "barrier":
        return call
    if detail is None:
        return f"{num_bytes} bytes of {dtype}"
    more = {"all_gather": f", last dimension {detail}", "broadcast": f" from rank {detail}"}.get(call, "")
    return f"{call} of {num_bytes} bytes of {dtype}{more}"
