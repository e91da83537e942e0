"""Calls of the CPU's own attention kernel, ``paged_attention.cpp``: from tensors to addresses and strides.

The kernel gets one structure per layer. It writes new keys and values to their slots and attends to the cache block by block: nothing is
gathered, nothing large is allocated. ctypes lets go of the interpreter's lock meanwhile.
"""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from trencadis.errors import BackendError, InternalError, OutOfMemoryError
from trencadis.records import Int32Array
from trencadis_torch.attention.options import NUMBERS, AttentionOptions
from trencadis_torch.cache.kv_cache import AttentionLayer, PagedKVCache
from trencadis_torch.native_build import Source, load_library

__all__ = ["CALL", "DTYPES", "NativeAttention", "NativePass", "compiled_kernel", "obstacle", "source_for"]

logger = logging.getLogger("trencadis.torch")

SOURCE = Path(__file__).with_name("paged_attention.cpp")

_NOT_COMPILED = 2

MAX_HEAD_DIM = 1024
"""Elements of one head that the kernel has room for."""

DTYPES: Final = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3}
"""Numbers of the kernel for what keys, values and queries are held in."""

_POINTERS = (
    *("query", "new_keys", "new_values", "output", "keys", "values", "sinks", "tables", "slots"),
    *("rows", "starts", "query_lens", "firsts"),
)
_COUNTS = (
    *("num_sequences", "num_tokens", "num_heads", "num_kv_heads", "key_dim", "value_dim", "block_size", "table_stride"),
    *("query_token", "query_head", "key_token", "key_head", "value_token", "value_head"),
    *("window", "num_threads", "dtype", "cache_dtype"),
)


class _Call(ctypes.Structure):
    """Mirrors ``Call`` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _COUNTS),
        *((name, ctypes.c_double) for name in NUMBERS),
    )


_KERNELS: Final[dict[frozenset[torch.dtype], NativeAttention]] = {}
"""Kernels of this process, by the data types of caches that they read."""

CALL: Final = np.dtype(_Call)
"""One layer's call as a record: calls of several layers are an array of them."""


class NativeAttention:
    """The compiled kernel.

    Args:
        library: Compiled ``paged_attention.cpp``.

    Attributes:
        rows_together: Queries of a sequence, times query heads of a KV head, that the kernel takes together.
        in_team: Address of the function that all threads of a team call with the address of one call.

    Raises:
        BackendError: It is another one.
    """

    name = "native"

    def __init__(self, library: ctypes.CDLL) -> None:
        library.trencadis_call_bytes.restype = ctypes.c_int64
        library.trencadis_rows_together.restype = ctypes.c_int64
        library.trencadis_attend.restype = ctypes.c_int64
        library.trencadis_attend.argtypes = [ctypes.c_void_p]
        size = library.trencadis_call_bytes()
        if size != ctypes.sizeof(_Call):
            raise BackendError(f"{SOURCE.name} takes {size} bytes, {ctypes.sizeof(_Call)} are given: remove its cache.")
        self.rows_together: int = library.trencadis_rows_together()
        self._attend = library.trencadis_attend
        self.in_team = ctypes.cast(library.trencadis_attend_in_team, ctypes.c_void_p).value

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
    ) -> NativePass:
        """Return the calls of one pass; see :class:`~trencadis_torch.cache.kv_cache.PagedKernel`."""
        return NativePass(self._attend, cache, tables, slots.contiguous(), (rows, starts, query_lens, firsts))

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        cached: tuple[torch.Tensor, torch.Tensor],
        *,
        tables: torch.Tensor,
        slots: torch.Tensor,
        sequences: torch.Tensor,
        window: int,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Attend in one layer of a pass that is known by tensors alone; returns ``[T, H, Dv]``, 0 where no sequence attends.

        Args:
            query: ``[T, H, D]``.
            keys: Stored, ``[T, KV, D]``.
            values: Stored, ``[T, KV, Dv]``.
            cached: Keys and values of the layer by block; written to.
            tables: Block tables of all rows, int32 ``[num_rows, max_blocks]``.
            slots: Where new keys go, int64 ``[T]``, contiguous.
            sequences: Row, first query position, queries and first token of each, int32 ``[4, B]``, contiguous; without queries: none.
            window: Tokens that a query sees; 0 sees all.
            options: Options of the layer.

        Raises:
            OutOfMemoryError: No room for the kernel's own buffers.
        """
        call = _Call(
            tables=tables.data_ptr(),
            table_stride=tables.stride(0),
            slots=slots.data_ptr(),
            num_sequences=sequences.shape[1],
            num_tokens=len(slots),
            block_size=cached[0].shape[1],
            num_threads=torch.get_num_threads(),
        )
        first, step = sequences.data_ptr(), sequences.stride(0) * sequences.itemsize
        call.rows, call.starts, call.query_lens, call.firsts = range(first, first + 4 * step, step)
        output = query.new_zeros(*query.shape[:2], values.shape[2])
        _attend(
            self._attend,
            call,
            (query, keys, values),
            cached,
            output=output,
            window=window,
            options=options,
        )
        return output


class NativePass:
    """One pass over one cache; made by :meth:`NativeAttention.begin`."""

    def __init__(
        self,
        attend: Any,
        cache: PagedKVCache,
        tables: torch.Tensor,
        slots: torch.Tensor,
        sequences: tuple[Int32Array, Int32Array, Int32Array, Int32Array],
    ) -> None:
        self._attend = attend
        self._cache = cache
        self._windows = {layer.index: layer.window for layer in cache.layers}
        arrays = [np.ascontiguousarray(array, np.int32) for array in sequences]
        self._held = (tables, slots, arrays)  # the kernel has their addresses
        self._call = call = _Call(
            tables=tables.data_ptr(),
            table_stride=tables.stride(0),
            slots=slots.data_ptr(),
            num_sequences=len(arrays[0]),
            num_tokens=len(slots),
            block_size=cache.block_size,
            num_threads=torch.get_num_threads(),
        )
        call.rows, call.starts, call.query_lens, call.firsts = (array.ctypes.data for array in arrays)

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

        Raises:
            OutOfMemoryError: No room for the kernel's own buffers.
        """
        _attend(
            self._attend,
            self._call,
            (query, keys, values),
            self._cache.layer(layer_index),
            output=output,
            window=self._windows[layer_index],
            options=options,
        )


def _attend(
    function: Any,
    call: _Call,
    new: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    cached: tuple[torch.Tensor, torch.Tensor],
    *,
    output: torch.Tensor,
    window: int,
    options: AttentionOptions,
) -> None:
    """Fill in one layer's part of ``call``, and call the kernel."""
    query, keys, values = (_dense(one) for one in new)
    numbers, sinks = options.packed(query.shape[2])
    call.query, call.new_keys, call.new_values = query.data_ptr(), keys.data_ptr(), values.data_ptr()
    call.output, call.keys, call.values = output.data_ptr(), cached[0].data_ptr(), cached[1].data_ptr()
    call.sinks = None if sinks is None else sinks.data_ptr()
    call.num_heads, call.num_kv_heads = query.shape[1], keys.shape[1]
    call.key_dim, call.value_dim = keys.shape[2], values.shape[2]
    call.query_token, call.query_head, _ = query.stride()
    call.key_token, call.key_head, _ = keys.stride()
    call.value_token, call.value_head, _ = values.stride()
    call.window = window
    call.dtype, call.cache_dtype = DTYPES[query.dtype], DTYPES[cached[0].dtype]
    for name, number in zip(NUMBERS, numbers, strict=True):
        setattr(call, name, number)
    failure = function(ctypes.addressof(call))
    if failure == _NOT_COMPILED:
        raise InternalError(f"the attention kernel was not compiled for a cache of {cached[0].dtype}")
    if failure:
        raise OutOfMemoryError("The attention kernel has no room for its buffers.", hint="Lower engine.max_num_seqs.")


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def obstacle(device: torch.device, layout: str, layers: tuple[AttentionLayer, ...]) -> str | None:
    """Return why the kernel cannot serve these layers; None: nothing speaks against it.

    Args:
        device: Device of the model.
        layout: ``ragged`` or ``padded``; graphs of torch.compile, which may call the kernel, count as ``ragged``.
        layers: The attention layers.
    """
    if device.type != "cpu":
        return f"the kernel runs on the CPU, not on {device}"
    if layout != "ragged":
        return f'layout = "{layout}" attends as static-shape devices do, but with compile = "buckets"'
    for layer in layers:
        if max(layer.key_dim, layer.value_dim) > MAX_HEAD_DIM:
            return f"layer {layer.index} has heads of more than {MAX_HEAD_DIM} elements"
        if layer.dtype not in DTYPES:
            return f"layer {layer.index} computes in {layer.dtype}"
    return None


def source_for(dtypes: frozenset[torch.dtype]) -> Source:
    """Return the source that is compiled for caches of these data types; each takes seconds. Pure."""
    if dtypes.isdisjoint(DTYPES) or dtypes.issuperset(DTYPES):
        return Source(SOURCE)
    return Source(SOURCE, (f"TRENCADIS_FORMATS={sum(1 << DTYPES[dtype] for dtype in dtypes & DTYPES.keys())}",))


def compiled_kernel(dtypes: frozenset[torch.dtype] = frozenset(DTYPES)) -> NativeAttention:
    """Return the kernel, compiled when it is first asked for.

    Args:
        dtypes: Data types of caches that it is to read.

    Raises:
        BackendError: There is no compiler, or it fails.
    """
    for known, kernel in _KERNELS.items():
        if dtypes <= known:
            return kernel
    kernel = _KERNELS[dtypes] = NativeAttention(load_library(source_for(dtypes)))
    return kernel
