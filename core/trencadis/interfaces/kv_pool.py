"""What a backend shows of its KV cache to those who move blocks: bytes by block id, whatever the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trencadis.errors import BackendError
from trencadis.records import KVLayout

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from trencadis.interfaces.kv_blender import KVBlender

__all__ = ["KVPool"]


class KVPool(ABC):
    """The blocks of one rank. ``Backend.kv_cache`` returns one.

    Both ways are for blocks that nothing else reads or writes meanwhile, and return when the copy is done.

    Attributes:
        any_thread: They may be called from any thread; else only from the backend's, where the worker side's methods run.
        layerwise: It has ``read_layer`` and ``write_layer``, the other two ways.
    """

    any_thread: bool = True
    layerwise: bool = False

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

    def read_layer(self, layer: int, blocks: Sequence[int], out: NDArray[np.uint8]) -> None:
        """Copy one layer of blocks to host memory.

        Args:
            layer: Number of the layer; see ``KVPart.layer``.
            blocks: Ids, ``[n]``.
            out: ``[n, KVLayout.layer_bytes(layer)]``, C order.

        Raises:
            BackendError: The pool has no such way.
        """
        raise BackendError(f"{type(self).__name__} does not read blocks by layer.")

    def write_layer(self, layer: int, blocks: Sequence[int], data: NDArray[np.uint8]) -> None:
        """Copy one layer of blocks from host memory; the others stay as they are.

        Args:
            layer: Number of the layer; see ``KVPart.layer``.
            blocks: Ids, ``[n]``, none twice.
            data: ``[n, KVLayout.layer_bytes(layer)]``, C order.

        Raises:
            BackendError: The pool has no such way.
        """
        raise BackendError(f"{type(self).__name__} does not write blocks by layer.")

    def view_blocks(self, blocks: Sequence[int]) -> Sequence[Sequence[memoryview]] | None:
        """Return where blocks lie in host memory, for readers who can do without a copy, or None if they do not.

        Args:
            blocks: Ids, ``[n]``.

        Returns:
            Of each block the pieces that are its bytes, one after the other; they are read, never written to.
        """
        return None

    def blender(self) -> KVBlender | None:
        """Return what puts KV of chunks together here, or None if nothing does. On the backend's thread; may take a moment.

        Raises:
            BackendError: The backend could, but not with this model; the message says why.
        """
        return None
