"""What a backend shows of its KV cache to those who move blocks: bytes by block id, whatever the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trencadis.records import KVLayout

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from trencadis.interfaces.kv_blender import KVBlender

__all__ = ["KVPool"]


class KVPool(ABC):
    """The blocks of one rank. ``Backend.kv_cache`` returns one.

    Both ways are for blocks that nobody else reads or writes meanwhile, and return when the copy is done.

    Attributes:
        any_thread: They may be called from any thread; else only from the backend's, where the worker side's methods run.
    """

    any_thread: bool = True

    @property
    @abstractmethod
    def layout(self) -> KVLayout:
        """What the bytes of a block mean."""

    @abstractmethod
    def read_blocks(self, blocks: Sequence[int], out: NDArray[np.uint8]) -> None:
        """Copy blocks to host memory.

        Args:
            blocks: Ids, ``[n]``.
            out: ``[n, block_bytes]``, C order.
        """

    @abstractmethod
    def write_blocks(self, blocks: Sequence[int], data: NDArray[np.uint8]) -> None:
        """Copy blocks from host memory.

        Args:
            blocks: Ids, ``[n]``, none twice.
            data: ``[n, block_bytes]``, C order.
        """

    def view_blocks(self, blocks: Sequence[int]) -> Sequence[Sequence[memoryview]] | None:
        """Return where blocks lie in host memory, for readers who can do without a copy, or None if they do not.

        Args:
            blocks: Ids, ``[n]``.

        Returns:
            Of each block the pieces that are its bytes, one behind the other; they are read, never written to.
        """
        return None

    def blender(self) -> KVBlender | None:
        """Return what puts KV of chunks together here, or None if nothing does. On the backend's thread; may take a moment.

        Raises:
            BackendError: The backend could, but not with this model; the message says why.
        """
        return None
