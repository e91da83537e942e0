"""The paged KV cache, and the interface of kernels that attend over it in place, on any device.

Shapes: N blocks, S tokens per block, KV heads, head dimension; a slot is block × S + offset. One block more than asked for,
the last, takes what padding writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from trencadis.errors import OutOfMemoryError
from trencadis.interfaces import KVBlender, KVPool
from trencadis.records import Int32Array, KVLayout, KVPart
from trencadis_torch.attention.options import AttentionOptions
from trencadis_torch.cache.host_parts import HostParts
from trencadis_torch.cache.storage import STORED_DTYPES, encode, stored_dim

__all__ = ["AttentionLayer", "KernelPass", "PagedKVCache", "PagedKernel", "StaticKernel", "stored_layers"]


@attrs.frozen(kw_only=True)
class AttentionLayer:
    """Shape and window of one attention layer, found by a probe forward (see ``loading/inspection.py``).

    Attributes:
        index: The module's ``layer_idx``.
        num_kv_heads: Heads of keys and values.
        key_dim: Key dimension of one head.
        value_dim: Value dimension of one head; differs from ``key_dim`` in latent attention.
        window: A query sees this many tokens, itself included; 0 sees all.
        dtype: Data type of keys and values in the cache.
    """

    index: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """KV cache of one token, bytes."""
        dims = stored_dim(self.key_dim, self.dtype) + stored_dim(self.value_dim, self.dtype)
        return self.num_kv_heads * dims * self.dtype.itemsize


def stored_layers(layers: tuple[AttentionLayer, ...], kv_dtype: str) -> tuple[AttentionLayer, ...]:
    """Return the layers with the dtype that the cache shall have. Pure.

    Args:
        layers: Attention layers with the dtypes that the model computes.
        kv_dtype: ``auto``, which changes nothing, or a name of ``STORED_DTYPES``.
    """
    if kv_dtype == "auto":
        return layers
    return tuple(attrs.evolve(layer, dtype=STORED_DTYPES[kv_dtype]) for layer in layers)


class PagedKVCache(KVPool):
    """Keys and values of every layer, by slot.

    Worker sides of KV connectors get this object, most as a :class:`KVPool`. ``keys`` and ``values`` are tuples over layers of
    tensors ``[num_blocks + 1, block_size, num_kv_heads, head_dim]``; a block's bytes are one contiguous range of each.
    Heads of int8 have a few elements more; see ``storage.py``.

    Args:
        layers: The attention layers.
        num_blocks: Usable blocks; block ``num_blocks`` is the padding block.
        block_size: Tokens per block.
        device: Where.
        kernel: Attends over the cache where it lies; None: blocks are gathered.

    Raises:
        OutOfMemoryError: No room.

    Attributes:
        kernels: Whose low bits the content has.
        sums: See :class:`KVLayout`.
        first_head: First KV head held here, counted over all ranks.
        make_blender: Makes what :meth:`blender` returns; None where nothing blends.
    """

    kernels: str = "torch"
    sums: str = ""
    first_head: int = 0
    layerwise = True
    make_blender: Callable[[PagedKVCache], KVBlender] | None = None

    def __init__(
        self,
        layers: tuple[AttentionLayer, ...],
        *,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        kernel: PagedKernel | None = None,
    ) -> None:
        self.layers = layers
        self.kernel = kernel
        if kernel is not None:
            self.kernels = kernel.name
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        self._at = {layer.index: i for i, layer in enumerate(layers)}
        dims = [
            *((layer, stored_dim(layer.key_dim, layer.dtype)) for layer in layers),
            *((layer, stored_dim(layer.value_dim, layer.dtype)) for layer in layers),
        ]
        try:
            self._host = self._host_memory(dims) if device.type == "cpu" else None
            parts = tuple(self._empty(i, layer, head_dim) for i, (layer, head_dim) in enumerate(dims))
            self.keys, self.values = parts[: len(layers)], parts[len(layers) :]
        except (RuntimeError, MemoryError) as error:
            size = (num_blocks + 1) * block_size * sum(layer.bytes_per_token for layer in layers)
            raise OutOfMemoryError(
                f"{device} has no room for a KV cache of {num_blocks} blocks, {size / 2**20:.0f} MiB: {error}.",
                hint="Lower cache.num_blocks, cache.memory_fraction or model.max_model_len.",
            ) from error

    @property
    def layout(self) -> KVLayout:
        """Keys of all layers, then values of all layers; each part of a block is one contiguous range of a tensor."""
        num_heads = max(layer.num_kv_heads for layer in self.layers)
        return KVLayout(
            parts=tuple(_part(layer, kind) for kind in ("key", "value") for layer in self.layers),
            block_size=self.block_size,
            first_head=self.first_head,
            last_head=self.first_head + num_heads,
            numerics=f"{self.kernels}-{self.device.type}",
            sums=self.sums,
        )

    @torch.inference_mode()
    def read_blocks(self, blocks: Sequence[int], out: NDArray[np.uint8]) -> None:
        """Copy blocks to host memory; on a device gathered there first, in the order of its stream."""
        if self._host is not None:
            self._host.read(blocks, out)
            return
        index, start = torch.tensor(blocks, dtype=torch.int64, device=self.device), 0
        for cache in self.parts:
            found = cache.flatten(1).view(torch.uint8).index_select(0, index)
            out[:, start : start + found.shape[1]] = found.cpu().numpy()
            start += found.shape[1]

    @torch.inference_mode()
    def write_blocks(self, blocks: Sequence[int], data: NDArray[np.uint8]) -> None:
        """Copy blocks from host memory; returns when they are in place."""
        if self._host is not None:
            self._host.write(blocks, data)
            return
        self._put(self.parts, torch.tensor(blocks, dtype=torch.int64, device=self.device), data)

    @torch.inference_mode()
    def read_layer(self, layer: int, blocks: Sequence[int], out: NDArray[np.uint8]) -> None:
        """Copy the keys, then the values, of one layer of blocks to host memory."""
        if self._host is not None:
            self._host.read_layer(self._at[layer], blocks, out)
            return
        index, start = torch.tensor(blocks, dtype=torch.int64, device=self.device), 0
        for cache in self.layer(layer):
            found = cache.flatten(1).view(torch.uint8).index_select(0, index)
            out[:, start : start + found.shape[1]] = found.cpu().numpy()
            start += found.shape[1]

    @torch.inference_mode()
    def write_layer(self, layer: int, blocks: Sequence[int], data: NDArray[np.uint8]) -> None:
        """Copy the keys and values of one layer of blocks from host memory; returns when they are in place."""
        if self._host is not None:
            self._host.write_layer(self._at[layer], blocks, data)
            return
        index = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        self._put(self.layer(layer), index, data)

    def _put(self, parts: Sequence[torch.Tensor], index: torch.Tensor, data: NDArray[np.uint8]) -> None:
        """Copy consecutive blocks of ``data`` to blocks of some parts."""
        start = 0
        for cache in parts:
            flat = cache.flatten(1).view(torch.uint8)
            # A copy, for the caller's memory may be read-only, which a tensor cannot be.
            new = torch.from_numpy(data[:, start : start + flat.shape[1]].copy())
            flat.index_copy_(0, index, new.to(self.device))
            start += flat.shape[1]
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def view_blocks(self, blocks: Sequence[int]) -> list[list[memoryview]] | None:
        """Return where blocks lie; None if that is not host memory."""
        return None if self._host is None else [self._host.view(block) for block in blocks]

    def blender(self) -> KVBlender | None:
        """Return a new blender."""
        return None if self.make_blender is None else self.make_blender(self)

    @property
    def padding_block(self) -> int:
        """The block that padding reads and writes."""
        return self.num_blocks

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """Keys, then values, of all layers, by block."""
        return (*self.keys, *self.values)

    def _host_memory(self, dims: Sequence[tuple[AttentionLayer, int]]) -> HostParts:
        slots = [layer.num_kv_heads * head_dim * layer.dtype.itemsize for layer, head_dim in dims]
        return HostParts([self.block_size * slot_bytes for slot_bytes in slots], self.num_blocks + 1)

    def _empty(self, part: int, layer: AttentionLayer, head_dim: int) -> torch.Tensor:
        # Zeros, not whatever is there: a masked slot still enters products, and 0 × NaN is NaN.
        shape = (self.num_blocks + 1, self.block_size, layer.num_kv_heads, head_dim)
        if self._host is None:
            return torch.zeros(shape, dtype=layer.dtype, device=self.device)
        # torch.zeros would touch gigabytes now.
        return torch.from_numpy(self._host.rows[part].reshape(-1)).view(layer.dtype).view(shape)

    def prefault(self) -> None:
        """Have the system give all memory now, on the CPU; else it gives pages when they are first written."""
        if self._host is not None:
            for part in self.parts:
                part.zero_()

    def layer(self, layer_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of a layer, each ``[num_blocks + 1, block_size, num_kv_heads, head_dim]``."""
        at = self._at[layer_index]
        return self.keys[at], self.values[at]

    def write(self, layer_index: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store new keys and values in place.

        Args:
            layer_index: The module's ``layer_idx``.
            slots: int64 ``[T]``.
            keys: ``[T, num_kv_heads, key_dim]``.
            values: ``[T, num_kv_heads, value_dim]``.
        """
        for cache, new in zip(self.layer(layer_index), (keys, values), strict=True):
            cache.flatten(0, 1).index_copy_(0, slots, encode(new, cache.dtype))

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy tokens in place, all layers; every source is read before any target is written.

        Args:
            sources: Slots, int64 ``[n]``.
            targets: Slots, int64 ``[n]``, none twice.
        """
        for cache in self.parts:
            flat = cache.flatten(0, 1)
            flat.index_copy_(0, targets, flat.index_select(0, sources))

    def copy_blocks(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy blocks in place, all layers; every source is read before any target is written.

        Args:
            sources: int64 ``[n]``.
            targets: int64 ``[n]``, no block twice.
        """
        for cache in self.parts:
            cache.index_copy_(0, targets, cache.index_select(0, sources))

    def gather(self, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return copies of some blocks: of each of ``parts``, in the same order, ``[n, block_size, num_kv_heads, head_dim]``.

        Args:
            blocks: int64 ``[n]``.
        """
        return tuple(cache.index_select(0, blocks) for cache in self.parts)

    def scatter(self, blocks: torch.Tensor, contents: tuple[torch.Tensor, ...]) -> None:
        """Write the data of :meth:`gather` into blocks, in place.

        Args:
            blocks: int64 ``[n]``, none twice but the padding block.
            contents: Contents of each of ``parts``.
        """
        for cache, content in zip(self.parts, contents, strict=True):
            cache.index_copy_(0, blocks, content)


class KernelPass(Protocol):
    """The calls of one pass, one for each layer."""

    def attend(
        self,
        layer_index: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        output: torch.Tensor,
        options: AttentionOptions,
    ) -> None:
        """Store new keys and values of all tokens, and write attention outputs of the sequences that attend.

        Args:
            layer_index: The module's ``layer_idx``.
            query: ``[T, H, D]``.
            keys: ``[T, KV, D]``.
            values: ``[T, KV, Dv]``.
            output: Written to, ``[T, H, Dv]``, contiguous, the dtype of ``query``.
            options: Options of the layer.
        """
        ...


class PagedKernel(Protocol):
    """A kernel.

    Attributes:
        name: Whose low bits the cache's content has.
    """

    @property
    def name(self) -> str:  # noqa: D102 - above
        ...

    def begin(
        self,
        cache: PagedKVCache,
        *,
        tables: torch.Tensor,
        slots: torch.Tensor,
        rows: Int32Array,
        starts: Int32Array,
        query_lens: Int32Array,
        firsts: Int32Array,
    ) -> KernelPass:
        """Return the calls of one pass.

        Args:
            cache: Read and written.
            tables: Block tables of all rows, int32 ``[num_rows, max_blocks]``.
            slots: Where new keys go, of all tokens of the pass, int64 ``[T]``.
            rows: Row of each sequence that attends.
            starts: First query position of each.
            query_lens: Queries of each.
            firsts: Token of the pass with each one's first query.
        """
        ...


@runtime_checkable
class StaticKernel(PagedKernel, Protocol):
    """A kernel whose passes can be made from tensors on the device alone."""

    def begin_static(
        self,
        cache: PagedKVCache,
        *,
        tables: torch.Tensor,
        slots: torch.Tensor,
        rows: torch.Tensor,
        starts: torch.Tensor,
        query_lens: torch.Tensor,
        query_len: int,
    ) -> KernelPass:
        """Return the calls of a padded pass; every shape follows from the arguments'.

        Args:
            cache: Read and written.
            tables: Block tables of all rows, int32 ``[num_rows, max_blocks]``.
            slots: Where new keys go, of all tokens of the bucket, int64 ``[B × query_len]``.
            rows: int64 ``[B]``; of padding any.
            starts: int64 ``[B]``.
            query_lens: int64 ``[B]``; 0 of padding, which attends to nothing.
            query_len: The bucket's; each sequence has as many tokens.
        """
        ...


def _part(layer: AttentionLayer, kind: str) -> KVPart:
    return KVPart(
        layer=layer.index,
        kind=kind,
        num_heads=layer.num_kv_heads,
        head_dim=stored_dim(layer.key_dim if kind == "key" else layer.value_dim, layer.dtype),
        dtype=str(layer.dtype).removeprefix("torch."),
        item_bytes=layer.dtype.itemsize,
    )
