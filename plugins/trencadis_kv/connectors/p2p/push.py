"""Blocks that an engine sends along with its prefill response: memory set aside for them, and where each is until its request takes it.

    delegated ─▶ open: memory is set aside ─▶ the response comes ─▶ blocks come, each is verified ─▶ committed, broken off, or late
                                              └▶ the request takes them as they come ─▶ close: the memory is free

Blocks are not requested one by one, and nothing that arrives touches the device before the request has blocks there. Whatever does not
come this way is pulled.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from trencadis.errors import TransferError
from trencadis.records import TransferCause

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Push", "Pushes"]


class Push:
    """Blocks of one prompt on their way. One thread receives, one takes; the rest from any.

    Args:
        hashes: Of the blocks, in order.
        block_bytes: Of a block.
        free: Called once with the bytes, when neither receives nor takes any more.

    Attributes:
        hashes: As given.
        error: Why the rest does not come; None while it may, and if all came.
    """

    def __init__(self, hashes: Sequence[bytes], block_bytes: int, *, free: Callable[[int], None]) -> None:
        self.hashes = tuple(hashes)
        self.error: TransferError | None = None
        self._rows: NDArray[np.uint8] = np.empty((len(self.hashes), block_bytes), np.uint8)
        self._num_bytes = self._rows.nbytes
        self._free = free
        self._changed = threading.Condition()
        self._num_there, self._num_due = 0, len(self.hashes)
        self._cut: Callable[[], None] = lambda: None
        self._has_ended = self._is_closed = False

    @property
    def num_bytes(self) -> int:
        """Set aside for it."""
        return self._num_bytes

    @property
    def is_closed(self) -> bool:
        """Cancelled: the blocks are not needed any more."""
        return self._is_closed

    def begin(self, num_blocks: int, cut: Callable[[], None]) -> None:
        """Register the connection that receives the blocks, before the first block.

        Args:
            num_blocks: At most as many as there is memory for.
            cut: Ends the connection; does not wait.
        """
        with self._changed:
            self._cut, self._num_due = cut, num_blocks
            self._changed.notify_all()
            is_closed = self._is_closed
        if is_closed:
            cut()

    def row(self, index: int) -> NDArray[np.uint8]:
        """Return where a block is to be received, ``[block_bytes]``.

        Raises:
            TransferError: ``cancelled``: it was cancelled.
        """
        with self._changed:
            if self._is_closed:
                raise TransferError("The blocks are not wanted any more.", cause=TransferCause.CANCELLED)
            row: NDArray[np.uint8] = self._rows[index]
            return row

    def came(self) -> None:
        """Called when the next block is there and verified."""
        with self._changed:
            self._num_there += 1
            self._changed.notify_all()

    def end(self, error: TransferError | None = None) -> None:
        """Called when nothing more comes; may be called twice."""
        with self._changed:
            if self._has_ended:
                return
            self._has_ended, self.error, self._cut = True, error, lambda: None
            self._changed.notify_all()
            is_over = self._is_closed
        if is_over:
            self._give_back()

    def wait(self, num_blocks: int, *, until_s: float) -> NDArray[np.uint8]:
        """Return the blocks that are there, ``[n, block_bytes]``, once there are more than ``num_blocks``, or there will not be.

        Args:
            num_blocks: That are known to be there.
            until_s: The latest time to return, of ``time.monotonic``.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: not self._is_due(num_blocks),
                max(0.0, until_s - time.monotonic()),
            )
            return self._rows[: 0 if self._is_closed else self._num_there]

    def close(self) -> None:
        """Want nothing of it any more; may be called twice."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
            is_over, is_complete, cut = self._has_ended, self._num_there >= self._num_due, self._cut
        if is_over:
            self._give_back()
        elif not is_complete:  # else only the word that this was all is missing
            cut()

    def _is_due(self, num_blocks: int) -> bool:
        """Return whether more than so many blocks may be there later, and are not yet."""
        is_open = not self._has_ended and not self._is_closed
        return is_open and self._num_there <= num_blocks < self._num_due

    def _give_back(self) -> None:
        self._rows = np.empty((0, 0), np.uint8)
        self._free(self._num_bytes)


class Pushes:
    """All that come to one engine, and the memory for them. From any thread.

    Args:
        max_bytes: Set aside at most.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._by_name: dict[str, Push] = {}
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Set aside now."""
        return self._num_bytes

    def open(self, hashes: Sequence[bytes], *, block_bytes: int) -> Push | None:
        """Set memory aside for as many leading blocks as there is room for; None if there is none for any."""
        with self._lock:
            num_blocks = min(len(hashes), (self._max_bytes - self._num_bytes) // block_bytes)
            if num_blocks < 1:
                return None
            self._num_bytes += num_blocks * block_bytes
        return Push(hashes[:num_blocks], block_bytes, free=self._give_back)

    def name(self, hold_id: str, push: Push) -> None:
        """Let a push be found by the id of the hold at the other engine."""
        with self._lock:
            self._by_name[hold_id] = push

    def take(self, hold_id: str) -> Push | None:
        """Return and forget the push for a hold id, which the caller owns from now on; None if there is none."""
        with self._lock:
            return self._by_name.pop(hold_id, None)

    def close(self) -> None:
        """Close all pushes that were not taken; may be called twice."""
        with self._lock:
            left, self._by_name = list(self._by_name.values()), {}
        for push in left:
            push.close()

    def _give_back(self, num_bytes: int) -> None:
        with self._lock:
            self._num_bytes -= num_bytes
