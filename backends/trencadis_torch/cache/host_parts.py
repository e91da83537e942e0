"""Memory of a CPU's KV cache, such that a block is copied by one call, during which other threads run Python.

A block is one row of each part: keys of all layers, then values of all layers. Neighbours of equal rows lie in one array::

    [parts, blocks, bytes of a row]        a block: array[:, block]        one layer of it: array[layer::layers, block]

Copies that hold Python's lock, row by row, keep the thread that runs the steps waiting at each of its operations.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["HostParts"]


class HostParts:
    """The bytes of all blocks, zeros at first. Any thread may copy; the caller ensures that the blocks are not in use elsewhere.

    Args:
        row_bytes: Size of one block in each part; keys of all layers, then values of as many.
        num_blocks: How many.

    Raises:
        MemoryError: No room.

    Attributes:
        rows: Bytes of each part, uint8 ``[num_blocks, row bytes]``.
    """

    def __init__(self, row_bytes: Sequence[int], num_blocks: int) -> None:
        self._stacks: list[tuple[NDArray[np.uint8], slice]] = []
        start = 0
        for size, equals in itertools.groupby(row_bytes):
            number = len(list(equals))
            # calloc gives zero pages that the system makes only when they are touched.
            stack = np.zeros(number * num_blocks * size, np.uint8).reshape(number, num_blocks, size)
            self._stacks.append((stack, slice(start, start + number * size)))
            start += number * size
        self._block_bytes = start
        self.rows: list[NDArray[np.uint8]] = [rows for stack, _ in self._stacks for rows in stack]

    def read(self, blocks: Sequence[int], out: NDArray[np.uint8]) -> None:
        """Copy blocks out; as ``KVPool.read_blocks``."""
        for at, first, last in _runs(blocks, out, self._block_bytes):
            for stack, columns in self._stacks:
                np.copyto(_by_part(out[at : at + last - first, columns], stack, last - first), stack[:, first:last])

    def write(self, blocks: Sequence[int], data: NDArray[np.uint8]) -> None:
        """Copy blocks in; as ``KVPool.write_blocks``."""
        for at, first, last in _runs(blocks, data, self._block_bytes):
            for stack, columns in self._stacks:
                np.copyto(stack[:, first:last], _by_part(data[at : at + last - first, columns], stack, last - first))

    def read_layer(self, place: int, blocks: Sequence[int], out: NDArray[np.uint8]) -> None:
        """Copy the keys, then the values, of one layer out.

        Args:
            place: Place of the layer, counted from 0.
            blocks: Ids, ``[n]``.
            out: uint8 ``[n, bytes of both]``.
        """
        pieces, num_bytes = self._layer(place)
        for at, first, last in _runs(blocks, out, num_bytes):
            for rows, columns in pieces:
                np.copyto(out[at : at + last - first, columns], rows[first:last])

    def write_layer(self, place: int, blocks: Sequence[int], data: NDArray[np.uint8]) -> None:
        """Copy the keys, then the values, of one layer in; as :meth:`read_layer`."""
        pieces, num_bytes = self._layer(place)
        for at, first, last in _runs(blocks, data, num_bytes):
            for rows, columns in pieces:
                np.copyto(rows[first:last], data[at : at + last - first, columns])

    def view(self, block: int) -> list[memoryview]:
        """Return where the parts of a block lie."""
        return [rows[block].data for rows in self.rows]

    def _layer(self, place: int) -> tuple[tuple[tuple[NDArray[np.uint8], slice], ...], int]:
        """Return the rows of a layer's two parts with their columns, and the bytes of both."""
        keys, values = self.rows[place], self.rows[len(self.rows) // 2 + place]
        middle = keys.shape[1]
        end = middle + values.shape[1]
        return ((keys, slice(middle)), (values, slice(middle, end))), end


def _by_part(data: NDArray[np.uint8], stack: NDArray[np.uint8], number: int) -> NDArray[np.uint8]:
    """Return columns of blocks' bytes ``[number, parts × row bytes]`` as ``[parts, number, row bytes]``, a view."""
    return data.reshape(number, stack.shape[0], stack.shape[2]).swapaxes(0, 1)


def _runs(blocks: Sequence[int], data: NDArray[np.uint8], num_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Yield runs of consecutive ids: where each begins, its first id, and one past its last. Pure.

    Raises:
        ValueError: The data are not so many bytes of each block.
    """
    if data.shape != (len(blocks), num_bytes):
        raise ValueError(f"Data {data.shape} are not {num_bytes} bytes of each of {len(blocks)} blocks.")
    start = 0
    for i in range(1, len(blocks) + 1):
        if i == len(blocks) or blocks[i] != blocks[i - 1] + 1:
            yield start, int(blocks[start]), int(blocks[i - 1]) + 1
            start = i
