"""Another way for the bytes of blocks than the connection that two engines talk over.

The connection says what is to be moved, and what was. The producer writes blocks to memory that the consumer lends it, piece by piece;
the consumer verifies them there, and only then are they the device's::

    consumer                                            producer
    lends pieces of a receive buffer   ── PULL (target) ─▶     reads blocks from its device
                                                 ◀═══   writes them to a piece
    verifies, takes them        ◀─ PLACED (piece) ──
                                ── TAKEN (piece) ─▶     may write to it again

A write that is under way may not be possible to break off. So memory that a producer was let write to is used for something else only
when that has said that it is done, or when whatever it writes through is gone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Flight", "ReceiveBuffer", "Transport"]


class ReceiveBuffer(ABC):
    """Pieces of memory that one producer may write to, for one pull.

    Attributes:
        via: Name of the transport.
        target: What the producer has to know.
        num_pieces: How many.
        is_quiet: The producer has said that it writes no more; set by who asked for the receive buffer.
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
        """Return whether there is such a piece, with so many rows. Pure."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory back; without ``is_quiet`` it stays out of use until nobody can write to it."""


class Flight(ABC):
    """A producer's way to one receive buffer; a context manager that closes it.

    Attributes:
        num_pieces: Of the receive buffer.
    """

    num_pieces: int

    @abstractmethod
    def rows(self, index: int) -> NDArray[np.uint8]:
        """Return where blocks for a piece are put together, ``[rows, block_bytes]``: memory of the producer's, or the piece itself.

        Args:
            index: Of a piece that is the producer's to write to.
        """

    @abstractmethod
    def write(self, index: int, num_rows: int, *, timeout_s: float, is_gone: Callable[[], bool]) -> None:
        """Write leading rows of :meth:`rows` to the piece; returns when they are there.

        Args:
            index: Of the piece.
            num_rows: At most all.
            timeout_s: The longest wait, real time.
            is_gone: Whether the consumer has gone; looked at now and then.

        Raises:
            TransferError: ``deadline``, ``unreachable`` or ``cancelled``; the flight is of no use any more.
        """

    @abstractmethod
    def close(self) -> None:
        """Give the memory back, once nothing reads it any more."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Transport(ABC):
    """Moves bytes between the memory of engines. From any thread.

    Attributes:
        name: That engines know it by.
    """

    name: str

    @abstractmethod
    def open(self, block_bytes: int) -> None:
        """Take memory.

        Args:
            block_bytes: Of a block.

        Raises:
            ConfigError: It cannot be used here.
        """

    @abstractmethod
    def receive_buffer(self) -> ReceiveBuffer | None:
        """Return memory for a pull; None if there is none now, so that the bytes go over the connection."""

    @abstractmethod
    def flight(self, target: bytes) -> Flight | None:
        """Return a way to a receive buffer; None if there is no memory now, so that the bytes go over the connection.

        Args:
            target: Of the receive buffer.

        Raises:
            TransferError: ``corrupt``: it is none.
        """

    @abstractmethod
    def close(self) -> None:
        """Give all memory back when nobody uses it any more; may be called twice."""
