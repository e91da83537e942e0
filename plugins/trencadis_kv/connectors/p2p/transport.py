"""Transports of blocks between engines other than their connection, such as shared memory.

Messages on the TCP connection say which blocks to move, and which were moved. The producer writes blocks to memory that
the consumer lends it, piece by piece; the consumer verifies them there before they are copied to the device::

    consumer                                            producer
    lends pieces of a receive buffer   ── PULL (target) ─▶     reads blocks from its device
                                                 ◀═══   writes them to a piece
    verifies, takes them        ◀─ PLACED (piece) ──
                                ── TAKEN (piece) ─▶     may write to it again

A write in progress cannot always be cancelled. So lent memory is reused only after the producer has said that it is
done, or after the channel that it writes through is gone.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import msgspec
import numpy as np

from trencadis.errors import TransferError
from trencadis.records import TransferCause

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Flight", "ReceiveBuffer", "SharedMemory", "Transport", "shared_memory"]


class ReceiveBuffer(ABC):
    """Pieces of memory for one pull, to which one producer writes.

    Attributes:
        via: Name of the transport.
        target: Address of the memory for the producer, as opaque bytes.
        num_pieces: Number of pieces.
        is_quiet: Whether the producer has said that it writes no more; set by the user of the receive buffer.
    """

    via: str
    target: bytes
    num_pieces: int
    is_quiet: bool = False

    @abstractmethod
    def rows(self, index: int) -> NDArray[np.uint8]:
        """Return a piece, ``[rows, block_bytes]``.

        Args:
            index: 0 .. number of pieces - 1.
        """

    @abstractmethod
    def holds(self, index: int, num_rows: int) -> bool:
        """Return whether a piece exists and has so many rows. Pure."""

    @abstractmethod
    def close(self) -> None:
        """Free the memory; unless ``is_quiet``, only once no producer can write to it."""


class Flight(ABC):
    """A producer's access to one receive buffer; a context manager that closes it.

    Attributes:
        num_pieces: Number of pieces of the receive buffer.
    """

    num_pieces: int

    @abstractmethod
    def rows(self, index: int) -> NDArray[np.uint8]:
        """Return the buffer for a piece, ``[rows, block_bytes]``: memory of the producer, or the piece itself.

        Args:
            index: Index of a piece that the producer may write to.
        """

    @abstractmethod
    def write(self, index: int, num_rows: int, *, timeout_s: float, is_gone: Callable[[], bool]) -> None:
        """Write leading rows of :meth:`rows` to the piece; returns when it is complete.

        Args:
            index: Index of the piece.
            num_rows: Number of leading rows, at most all.
            timeout_s: Longest wait, seconds of real time.
            is_gone: Returns whether the consumer has gone; called now and then.

        Raises:
            TransferError: ``deadline``, ``unreachable`` or ``cancelled``; the flight is unusable afterwards.
        """

    @abstractmethod
    def close(self) -> None:
        """Free the memory once nothing reads it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Transport(ABC):
    """Moves bytes between the memory of engines. From any thread.

    Attributes:
        name: Name of the transport in messages between engines.
    """

    name: str

    @abstractmethod
    def open(self, block_bytes: int) -> None:
        """Allocate memory.

        Args:
            block_bytes: Bytes per block.

        Raises:
            ConfigError: The transport cannot be used here.
        """

    @abstractmethod
    def receive_buffer(self) -> ReceiveBuffer | None:
        """Return memory for a pull; None if there is none: the bytes go over the connection."""

    @abstractmethod
    def flight(self, target: bytes) -> Flight | None:
        """Return the access to a receive buffer; None if there is no memory: the bytes go over the connection.

        Args:
            target: Address of the receive buffer, its ``target``.

        Raises:
            TransferError: ``corrupt``: the target is not valid.
        """

    @abstractmethod
    def close(self) -> None:
        """Free all memory once it is unused; may be called twice."""


_NAME: Final = "trencadis-kv"
_KEY_BYTES: Final = 32
_HEAD_BYTES: Final = 4096
"""Size of the head, which holds the key and nothing else; pieces begin on a page."""
_PIECE_BYTES: Final = 4 << 20
"""Approximate size of a piece: with smaller pieces each message takes as long as the bytes; at this size, data just
written are still in the last-level cache when they are verified and taken."""
_NUM_PIECES: Final = 2
"""One piece is written to while the other is verified, so neither end often waits for the other to be scheduled."""


class _Target(msgspec.Struct, array_like=True):
    """Address of a receive buffer."""

    machine: str
    process: int
    descriptor: int
    key: bytes
    num_pieces: int
    num_rows: int
    block_bytes: int

    @property
    def num_bytes(self) -> int:
        return _HEAD_BYTES + self.num_pieces * self.num_rows * self.block_bytes

    def pieces(self, memory: mmap.mmap) -> NDArray[np.uint8]:
        """Return the pieces, ``[pieces, rows, block_bytes]``; they keep the memory alive."""
        shape = self.num_pieces, self.num_rows, self.block_bytes
        return np.frombuffer(memory, np.uint8, offset=_HEAD_BYTES, count=self.num_bytes - _HEAD_BYTES).reshape(shape)


def shared_memory(num_landings: int) -> SharedMemory | None:
    """Return the transport, or None if the system does not support it.

    Args:
        num_landings: Maximum number of pulls that have memory at once; others go over the connection.
    """
    machine = _this_machine()
    return SharedMemory(machine, num_landings=num_landings) if machine else None


class SharedMemory(Transport):
    """Shared memory between engines of one machine.

    Args:
        machine: Identity that only processes which see each other have in common.
        num_landings: Maximum number of receive buffers at once.
    """

    name = "shared memory"

    def __init__(self, machine: str, *, num_landings: int) -> None:
        self._machine = machine
        self._num_left = num_landings
        self._lock = threading.Lock()
        self._free: list[_Memory] = []
        self._block_bytes = 0
        self._is_closed = False

    def open(self, block_bytes: int) -> None:
        """Set the size of a block; memory is allocated with the first pull."""
        self._block_bytes = block_bytes

    def receive_buffer(self) -> ReceiveBuffer | None:
        """Return memory for a pull; None if none is left."""
        with self._lock:
            if self._is_closed or (not self._free and not self._num_left):
                return None
            if self._free:
                return _SharedReceiveBuffer(self, self._free.pop())
            self._num_left -= 1
        try:
            return _SharedReceiveBuffer(self, _Memory(self._machine, block_bytes=self._block_bytes))
        except OSError:  # no memory, or no descriptor
            with self._lock:
                self._num_left += 1
            return None

    def flight(self, target: bytes) -> Flight | None:
        """Return the access to a receive buffer; None if this process cannot open it."""
        try:
            found = msgspec.msgpack.decode(target, type=_Target)
        except msgspec.MsgspecError as error:
            raise TransferError(f"A receive_buffer cannot be read: {error}.", cause=TransferCause.CORRUPT) from None
        if found.block_bytes != self._block_bytes or found.num_rows < 1 or found.num_pieces < 1:
            raise TransferError("A receive_buffer is for blocks of another kind.", cause=TransferCause.CORRUPT)
        memory = _opened(found) if found.machine == self._machine else None
        return None if memory is None else _SharedFlight(found.pieces(memory))

    def close(self) -> None:
        """Free all unused memory; the rest with its last user."""
        with self._lock:
            self._is_closed = True
            free, self._free = self._free, []
        for memory in free:
            memory.close()

    def give_back(self, memory: _Memory, *, is_quiet: bool) -> None:
        """Take back the memory of a pull.

        Args:
            memory: Memory of the pull.
            is_quiet: Whether nothing writes to it any more; otherwise it is never used again.
        """
        with self._lock:
            is_kept = is_quiet and not self._is_closed
            if is_kept:
                self._free.append(memory)
            else:
                self._num_left += 1
        if not is_kept:
            memory.close()


class _Memory:
    """Shared memory of this process.

    Raises:
        OSError: No memory or no descriptor is left.
    """

    def __init__(self, machine: str, *, block_bytes: int) -> None:
        num_rows = max(1, _PIECE_BYTES // block_bytes)
        key = secrets.token_bytes(_KEY_BYTES)
        self._descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.target = _Target(machine, os.getpid(), self._descriptor, key, _NUM_PIECES, num_rows, block_bytes)
        try:
            os.posix_fallocate(self._descriptor, 0, self.target.num_bytes)  # fails here, and not at the first write
            # If the file could shrink, a producer that writes beyond its end would be killed.
            fcntl.fcntl(
                self._descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            )
            memory = mmap.mmap(self._descriptor, self.target.num_bytes)
        except BaseException:
            self.close()
            raise
        memory[:_KEY_BYTES] = key
        self.pieces = self.target.pieces(memory)

    def close(self) -> None:
        """Close the descriptor; the memory is freed with its last user."""
        os.close(self._descriptor)


class _SharedReceiveBuffer(ReceiveBuffer):
    """Shared memory of one pull."""

    via = SharedMemory.name

    def __init__(self, transport: SharedMemory, memory: _Memory) -> None:
        self._transport = transport
        self._memory: _Memory | None = memory
        self._pieces = memory.pieces
        self.num_pieces = len(memory.pieces)
        self.target = msgspec.msgpack.encode(memory.target)

    def rows(self, index: int) -> NDArray[np.uint8]:
        """Return a piece."""
        rows: NDArray[np.uint8] = self._pieces[index]
        return rows

    def holds(self, index: int, num_rows: int) -> bool:
        """Return whether there is such a piece."""
        return 0 <= index < len(self._pieces) and num_rows <= len(self._pieces[index])

    def close(self) -> None:
        """Free the memory."""
        memory, self._memory = self._memory, None
        if memory is not None:
            self._transport.give_back(memory, is_quiet=self.is_quiet)


class _SharedFlight(Flight):
    """The pieces themselves: blocks are read from the device into them."""

    def __init__(self, pieces: NDArray[np.uint8]) -> None:
        self._pieces: NDArray[np.uint8] | None = pieces
        self.num_pieces = len(pieces)

    def rows(self, index: int) -> NDArray[np.uint8]:
        """Return a piece."""
        assert self._pieces is not None, "it is open"
        rows: NDArray[np.uint8] = self._pieces[index]
        return rows

    def write(self, index: int, num_rows: int, *, timeout_s: float, is_gone: Callable[[], bool]) -> None:
        """Do nothing: the rows are the piece."""

    def close(self) -> None:
        """Release the memory."""
        self._pieces = None


def _opened(target: _Target) -> mmap.mmap | None:
    """Return the memory of another process; None if it cannot be opened or does not match the target."""
    link = f"/proc/{target.process}/fd/{target.descriptor}"
    try:
        if not os.readlink(link).startswith(f"/memfd:{_NAME}"):
            return None
        descriptor = os.open(link, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return None
    try:
        # The size stays valid: a sealed file cannot shrink.
        is_sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        if not is_sealed or os.fstat(descriptor).st_size != target.num_bytes:
            return None
        memory = mmap.mmap(descriptor, target.num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return memory if secrets.compare_digest(memory[:_KEY_BYTES], target.key) else None


def _this_machine() -> str:
    """Return an identity of the machine or container, common to all processes that can share memory; empty if unknown."""
    if not all(hasattr(os, name) for name in ("memfd_create", "posix_fallocate")):
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
