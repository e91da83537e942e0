"""Calls of the Triton kernels: arguments of a launch, sizes of its tiles, and whether the kernels can be used here.

    host arrays of a pass ─ one copy ─▶ sequences [B, 4] ─▶ few queries │ many queries ─▶ a launch for each, layer after layer
    tensors of a bucket ────────────────▶ the same without a look at the host: a CUDA graph can hold it

The kernels run inside operators of PyTorch, ``trencadis::paged_attention`` and ``trencadis::store_paged``: whatever records or compiles
operations sees them.

Shapes: T tokens of the pass, H query heads, KV key-value heads, D and Dv their dimensions, B sequences.
"""

from __future__ import annotations

import functools
from typing import Any

import attrs
import numpy as np
import torch

from trencadis.records import Int32Array
from trencadis_torch.attention import triton_kernels
from trencadis_torch.attention.options import PACKED, AttentionOptions
from trencadis_torch.cache.kv_cache import AttentionLayer, PagedKVCache
from trencadis_torch.cache.storage import SCALE_BYTES
from trencadis_torch.device import to_device

__all__ = [
    "FEW",
    "Tile",
    "TritonAttention",
    "TritonPass",
    "launch",
    "num_spans",
    "obstacle",
    "operator",
    "store",
    "store_operator",
    "tile_for",
]

FEW = 16
"""Queries of a sequence up to which its keys are shared out: more of them keep enough programs busy."""

MAX_HEAD_DIM = 512
"""Elements of one head: beyond it tiles no longer fit the shared memory of a multiprocessor."""

MAX_GROUPS = 128
"""Query heads that share a KV head: all rows of a tile."""

MAX_SPANS = 32
MIN_SPAN = 128
"""Keys below which a span of its own costs more than it saves."""

PROGRAMS_PER_PROCESSOR = 4
"""Programs that keep a multiprocessor busy while others wait for memory."""

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@attrs.frozen(kw_only=True)
class Tile:
    """How much of a pass one program does.

    Attributes:
        rows: Queries × heads of a group, rounded up to a power of two; the matrix units want 16 or more.
        queries: Whole queries among them; the rest is idle.
        keys: Keys at a time.
        num_warps: Warps of a program.
    """

    rows: int
    queries: int
    keys: int
    num_warps: int


def tile_for(*, groups: int, most_queries: int, key_dim: int, value_dim: int, item_bytes: int) -> Tile:
    """Return the tile of a launch. Pure.

    There are three kinds, for one query of each sequence, for up to ``FEW`` and for more: each is compiled once, whatever is served.
    Measured on an H200 in bfloat16 with groups of four. For one query and heads of 128 elements no other number of keys, warps or stages
    is quicker by more than 3 %. With many queries eight warps are quicker for tiles of 128 rows, 64 for each four; else four take half
    to two thirds of the time of eight. By what the compiler says for compute capability 8.0 and 9.0, these tiles need at most 80 KiB of shared memory for two stages of keys
    and values, and less than 100 bytes of registers are spilled.

    Args:
        groups: Query heads of a KV head.
        most_queries: Largest number of queries of a sequence of the launch.
        key_dim: Key dimension of one head.
        value_dim: The same.
        item_bytes: Size of an element that is computed with, in bytes.
    """
    width = max(16, _power(key_dim), _power(value_dim))
    # Products of float32 without matrix units are unrolled: large tiles take the compiler minutes.
    elements = 8192 if item_bytes == 2 else 2048
    most_rows = max(16, min(128, elements // width))
    wanted = groups if most_queries == 1 else groups * FEW if most_queries <= FEW else most_rows
    rows = max(16, _power(groups), min(most_rows, _power(wanted)))
    keys = max(16, min(64, 16384 // (width * item_bytes)))
    return Tile(
        rows=rows,
        queries=1 if most_queries == 1 else rows // groups,
        keys=keys,
        num_warps=8 if rows >= 128 and rows * width >= 8192 else 4,
    )


def num_spans(num_programs: int, num_processors: int) -> int:
    """Return to how many programs the keys of a sequence are shared out, a power of two. Pure.

    Args:
        num_programs: Tiles × KV heads.
        num_processors: Multiprocessors of the device.
    """
    spans = 1
    while spans < MAX_SPANS and 2 * spans * num_programs <= PROGRAMS_PER_PROCESSOR * num_processors:
        spans *= 2
    return spans


def _power(number: int) -> int:
    return 1 << (number - 1).bit_length()


class TritonAttention:
    """The kernels on one device.

    Args:
        num_processors: Multiprocessors of the device.
    """

    name = "triton"

    def __init__(self, num_processors: int) -> None:
        self._num_processors = num_processors
        operator()

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
    ) -> TritonPass:
        """Return the calls of one pass; see :class:`~trencadis_torch.cache.kv_cache.PagedKernel`."""
        # Those with few queries first: each kind is one launch.
        is_many = query_lens > FEW
        order = np.argsort(is_many, kind="stable")
        facts = np.stack([rows, starts, query_lens, firsts], axis=1)[order].astype(np.int32)
        sequences = to_device(facts, tables.device)
        num_few = len(order) - int(is_many.sum())
        parts = [
            (sequences[chosen], int(facts[chosen, 2].max()))
            for chosen in (slice(num_few), slice(num_few, None))
            if len(facts[chosen])
        ]
        return TritonPass(cache, tables, slots, parts, self._num_processors)

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
    ) -> TritonPass:
        """Return the calls of a padded pass; see :class:`~trencadis_torch.cache.kv_cache.StaticKernel`."""
        firsts = torch.arange(len(rows), device=rows.device) * query_len
        sequences = torch.stack([rows, starts, query_lens, firsts], dim=1).int()
        return TritonPass(cache, tables, slots, [(sequences, query_len)], self._num_processors)


class TritonPass:
    """One pass over one cache; made by :class:`TritonAttention`."""

    def __init__(
        self,
        cache: PagedKVCache,
        tables: torch.Tensor,
        slots: torch.Tensor,
        parts: list[tuple[torch.Tensor, int]],
        num_processors: int,
    ) -> None:
        self._cache = cache
        self._tables = tables
        self._slots = slots
        self._parts = parts
        self._num_processors = num_processors
        self._windows = {layer.index: layer.window for layer in cache.layers}
        self._attend, self._store = operator(), store_operator()

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
        """Store new keys and values, and write outputs; see :class:`~trencadis_torch.cache.kv_cache.KernelPass`."""
        cached_keys, cached_values = self._cache.layer(layer_index)
        if cached_keys.dtype is keys.dtype:
            self._store(_dense(keys), _dense(values), self._slots, cached_keys, cached_values)
        else:
            self._cache.write(layer_index, self._slots, keys, values)
        query = _dense(query)
        numbers, sinks = options.packed(query.shape[-1])
        for sequences, most_queries in self._parts:
            self._attend(
                query,
                cached_keys,
                cached_values,
                self._tables,
                sequences,
                output,
                most_queries,
                self._windows[layer_index],
                self._num_processors,
                numbers,
                sinks,
            )


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


@functools.cache
def store_operator() -> Any:
    """Define ``trencadis::store_paged`` once, and return it."""
    make: Any = torch.library.Library
    library = make("trencadis", "FRAGMENT")
    library.define(
        "store_paged(Tensor keys, Tensor values, Tensor slots, Tensor(a!) cached_keys, Tensor(b!) cached_values) -> ()"
    )
    for key in ("CUDA", "CPU"):
        library.impl("store_paged", store, key)
    library.impl("store_paged", lambda *_: None, "Meta")
    found: Any = torch.ops.trencadis.store_paged.default
    return functools.partial(_call, found, library)


def store(
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    cached_keys: torch.Tensor,
    cached_values: torch.Tensor,
) -> None:
    """Launch the kernel that writes new keys and values to their slots; the implementation of the operator.

    Args:
        keys: ``[T, KV, D]``, the last axis dense.
        values: ``[T, KV, Dv]``, the same.
        slots: Where they go, int64 ``[T]``.
        cached_keys: Cached keys, ``[blocks, S, KV, D]``, contiguous, of the dtype of ``keys``.
        cached_values: The same, with ``Dv``.
    """
    num_tokens, num_heads, key_dim = keys.shape
    if not num_tokens:
        return
    value_dim = values.shape[2]
    triton_kernels.store_kernel[(num_tokens, num_heads)](
        *(keys, values, slots, cached_keys, cached_values, *keys.stride()[:2], *values.stride()[:2]),
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        KEY_PAD=_power(key_dim),
        VALUE_PAD=_power(value_dim),
        num_warps=1,
    )


@functools.cache
def operator() -> Any:
    """Define ``trencadis::paged_attention`` once, and return it."""
    make: Any = torch.library.Library
    library = make("trencadis", "FRAGMENT")
    library.define(
        "paged_attention(Tensor query, Tensor keys, Tensor values, Tensor tables, Tensor sequences, Tensor(a!) output, "
        f"int most_queries, int window, int num_processors, {PACKED}) -> ()"
    )
    for key in ("CUDA", "CPU"):  # on a CPU by Triton's interpreter
        library.impl("paged_attention", launch, key)
    library.impl("paged_attention", lambda *_: None, "Meta")
    # The library undefines what it defined when it is let go of.
    found: Any = torch.ops.trencadis.paged_attention.default
    return functools.partial(_call, found, library)


def _call(found: Any, _: Any, *args: Any) -> None:
    found(*args)


def launch(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    sequences: torch.Tensor,
    output: torch.Tensor,
    most_queries: int,
    window: int,
    num_processors: int,
    numbers: list[float],
    sinks: torch.Tensor | None,
) -> None:
    """Launch the kernels for one layer and one kind of sequences; the implementation of the operator.

    Args:
        query: ``[T, H, D]``, its last axis dense.
        keys: Cached keys, ``[blocks, S, KV, D or D + 4]``, contiguous.
        values: The same, with ``Dv``.
        tables: Block tables of all rows, int32 ``[num_rows, max_blocks]``.
        sequences: Row, context length, queries and first token of each, int32 ``[B, 4]``.
        output: Written to where a sequence has a query, ``[T, H, Dv]``, contiguous.
        most_queries: Largest number of queries of a sequence.
        window: Tokens that a query sees; 0 sees all.
        num_processors: Multiprocessors to keep busy.
        numbers: Numbers that :meth:`AttentionOptions.packed` returns; the kernel takes them in this order.
        sinks: The same.
    """
    heads, kv_heads, key_dim, value_dim = query.shape[1], keys.shape[2], query.shape[2], output.shape[2]
    tile = tile_for(
        groups=heads // kv_heads,
        most_queries=most_queries,
        key_dim=key_dim,
        value_dim=value_dim,
        item_bytes=query.dtype.itemsize,
    )
    tiles = -(-most_queries // tile.queries)
    num_tiles = tiles * len(sequences)
    spans = num_spans(num_tiles * kv_heads, num_processors) if most_queries <= FEW else 1
    is_int8 = keys.dtype is torch.int8
    scales = [one.view(torch.float32) if is_int8 else one for one in (keys, values)]
    places = output if sinks is None else sinks  # of the right device, and never read
    shape = (num_tiles * tile.queries, heads, spans) if spans > 1 else (0, 0, 0)
    partials, stats = (query.new_empty(*shape, size, dtype=torch.float32) for size in (value_dim, 2))
    common: dict[str, Any] = {
        "HEADS": heads,
        "VALUE_DIM": value_dim,
        "VALUE_PAD": max(16, _power(value_dim)),
        "QUERIES": tile.queries,
        "HAS_SINKS": sinks is not None,
    }
    strides = (*query.stride()[:2], *keys.stride()[1:3], *values.stride()[1:3], tables.stride(0))
    triton_kernels.attend_kernel[(num_tiles, kv_heads, spans)](
        *(query, keys, values, *scales, places, output, partials, stats, tables, sequences),
        *(*strides, *numbers, tiles),
        **common,
        GROUPS=heads // kv_heads,
        KEY_DIM=key_dim,
        KEY_PAD=max(16, _power(key_dim)),
        BLOCK_SIZE=keys.shape[1],
        ROWS=tile.rows,
        KEYS=tile.keys,
        IS_SPLIT=spans > 1,
        MIN_SPAN=MIN_SPAN,
        WINDOW=window,
        IS_INT8=is_int8,
        HAS_SOFTCAP=AttentionOptions.unpacked(numbers, sinks).softcap is not None,
        # Without it float32 would be rounded to 10 bits on the matrix units.
        PRECISION="ieee",
        num_warps=tile.num_warps,
        num_stages=2,
    )
    if spans > 1:
        merge = triton_kernels.merge_kernel[(num_tiles * tile.queries, heads)]
        merge(partials, stats, places, output, sequences, tiles, spans, **common, MOST_SPANS=MAX_SPANS)


def obstacle(layers: tuple[AttentionLayer, ...], device: torch.device) -> str | None:
    """Return why the kernels cannot serve these layers on this device; None: nothing speaks against it.

    Args:
        layers: Attention layers with the dtypes that the cache holds.
        device: Device of the model.
    """
    if not triton_kernels.is_installed():
        return "the package triton is missing, which a CUDA build of PyTorch brings"
    if device.type != "cuda" and not triton_kernels.is_interpreted():
        return f"the kernels run on CUDA, not on {device}"
    for layer in layers:
        if max(layer.key_dim, layer.value_dim) > MAX_HEAD_DIM:
            return f"layer {layer.index} has heads of more than {MAX_HEAD_DIM} elements"
        if layer.dtype is torch.int8 and (layer.key_dim % SCALE_BYTES or layer.value_dim % SCALE_BYTES):
            return (
                f"layer {layer.index} has heads of {layer.key_dim} and {layer.value_dim} elements, and int8 takes fours"
            )
        if layer.dtype is not torch.int8 and layer.dtype not in _DTYPES:
            return f"layer {layer.index} is held in {layer.dtype}"
    return None
