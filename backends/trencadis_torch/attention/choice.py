"""Which kernel attends over the paged cache: the CPU's own, Triton's on CUDA, or none, and then blocks are gathered.

A kernel of Triton is tried before it is trusted: compiled where it shall run, it attends to made-up sequences next to the gathering that it
replaces.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch

from trencadis.errors import BackendError
from trencadis_torch.attention import native as native_attention
from trencadis_torch.attention.native import NativeAttention
from trencadis_torch.attention.options import AttentionOptions
from trencadis_torch.attention.ragged import RaggedPass, Workspace
from trencadis_torch.cache.kv_cache import AttentionLayer, PagedKernel, PagedKVCache

__all__ = ["cache_dtypes", "choose_kernel", "prove"]

logger = logging.getLogger("trencadis.torch")

EXACT, ROUNDED = 1e-4, 5e-2
"""Largest difference from gathering, of unit normal values: with float32 throughout, and with 16 or 8 bits anywhere."""

SCENES = (((150, 7), (1, 1)), ((150, 7, 0, 40), (1, 3, 20, 17)))
"""Contexts and lengths of made-up sequences: decodes alone, of which one is long; the same with drafts, a prompt and a chunk."""

BLOCK_SIZE = 16
INTERPRETED_PROCESSORS = 8


def choose_kernel(
    asked: str,
    *,
    device: torch.device,
    layout: str,
    layers: tuple[AttentionLayer, ...],
    stored: tuple[AttentionLayer, ...] | None = None,
    num_heads: int = 0,
    in_graphs: bool = False,
) -> PagedKernel | None:
    """Return the kernel, compiled and tried if need be, or None for attention through gathering.

    Args:
        asked: ``auto``, ``native``, ``triton`` or ``sdpa``.
        device: Device of the model.
        layout: ``ragged`` or ``padded``.
        layers: The attention layers as the model computes them.
        stored: The same as the cache holds them; None: they are alike.
        num_heads: Query heads of a layer; 0: not known.
        in_graphs: Padded passes are graphs of torch.compile, which may call the CPU's kernel.

    Raises:
        BackendError: A kernel was asked for by name and cannot be had.
    """
    if asked == "sdpa":
        return None
    if asked == "native" or (asked == "auto" and device.type != "cuda"):
        layout = "ragged" if in_graphs else layout
        return _native(asked, device=device, layout=layout, layers=layers, stored=stored or layers)
    return _triton(asked, device=device, layers=layers, stored=stored or layers, num_heads=num_heads)


def _native(
    asked: str,
    *,
    device: torch.device,
    layout: str,
    layers: tuple[AttentionLayer, ...],
    stored: tuple[AttentionLayer, ...],
) -> NativeAttention | None:
    reason = native_attention.obstacle(device, layout, layers)
    try:
        if reason is None:
            return native_attention.compiled_kernel(cache_dtypes(layers, stored))
    except BackendError as error:
        if asked == "native":
            raise
        logger.warning("Attention gathers blocks, which is slower: %s %s", error, error.hint)
        return None
    if asked == "native":
        raise BackendError(
            f'[backend.torch] attention = "native": {reason}.', hint='Choose "auto", "triton" or "sdpa".'
        )
    return None


def cache_dtypes(layers: tuple[AttentionLayer, ...], stored: tuple[AttentionLayer, ...]) -> frozenset[torch.dtype]:
    """Return the data types of a model's caches: the serving one's, and the model's own, by which that is checked. Pure."""
    return frozenset(layer.dtype for layer in (*layers, *stored))


def _triton(
    asked: str,
    *,
    device: torch.device,
    layers: tuple[AttentionLayer, ...],
    stored: tuple[AttentionLayer, ...],
    num_heads: int,
) -> PagedKernel | None:
    from trencadis_torch.attention.triton import TritonAttention, obstacle

    reason = obstacle(stored, device)
    if reason is None:
        kernel = TritonAttention(_num_processors(device))
        # Once as few sequences are served, whose keys are shared out to many programs, and once as many are.
        for one in (kernel, TritonAttention(0)):
            reason = reason or prove(one, layers, stored, device=device, num_heads=num_heads)
    if reason is None:
        return kernel
    if asked == "triton":
        raise BackendError(f'[backend.torch] attention = "triton": {reason}.', hint='Choose "auto" or "sdpa".')
    logger.warning("Attention gathers blocks, which is slower: %s.", reason)
    return None


def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@torch.inference_mode()
def prove(
    kernel: PagedKernel,
    layers: tuple[AttentionLayer, ...],
    stored: tuple[AttentionLayer, ...],
    *,
    device: torch.device,
    num_heads: int = 0,
) -> str | None:
    """Return why a kernel is not to be trusted, or None; every kind of layer is tried once. Compiles, some seconds for each kind.

    Args:
        kernel: The kernel.
        layers: Attention layers with the dtypes that the model computes.
        stored: Attention layers with the dtypes that the cache holds.
        device: Where.
        num_heads: Query heads of a layer; 0: not known.
    """
    seen: set[tuple[Any, ...]] = set()
    for layer, held in zip(layers, stored, strict=True):
        kind = (held.num_kv_heads, held.key_dim, held.value_dim, held.window, held.dtype, layer.dtype)
        if kind in seen:
            continue
        seen.add(kind)
        allowed = EXACT if {layer.dtype, held.dtype} == {torch.float32} else ROUNDED
        try:
            difference = max(
                _difference(kernel, layer, held, scene, device=device, num_heads=num_heads) for scene in SCENES
            )
        except Exception as error:
            return f"its kernels failed for layer {layer.index}: {type(error).__name__}: {error}"
        if not difference <= allowed:
            return f"its outputs for layer {layer.index} differ by {difference:.2g} (allowed: {allowed:g})"
    return None


def _difference(
    kernel: PagedKernel,
    layer: AttentionLayer,
    held: AttentionLayer,
    scene: tuple[tuple[int, ...], tuple[int, ...]],
    *,
    device: torch.device,
    num_heads: int,
) -> float:
    """Return the largest difference between a kernel and gathering."""
    generator = torch.Generator().manual_seed(0)
    groups = num_heads // layer.num_kv_heads if num_heads and num_heads % layer.num_kv_heads == 0 else 1
    starts, lengths = (np.array(one, np.int32) for one in scene)
    ends = starts + lengths
    width = -(-int(ends.max()) // BLOCK_SIZE)
    tables = torch.randperm(len(ends) * width, generator=generator).view(len(ends), width).int().to(device)
    cache = PagedKVCache((held,), num_blocks=tables.numel(), block_size=BLOCK_SIZE, device=device)

    def draw(count: int, heads: int, dim: int) -> torch.Tensor:
        return torch.randn(count, heads, dim, generator=generator).to(device, layer.dtype)

    def slots(first: int, last: int, row: int) -> torch.Tensor:
        places = torch.arange(first, last, device=device)
        return tables[row, places // BLOCK_SIZE].long() * BLOCK_SIZE + places % BLOCK_SIZE

    for row, start in enumerate(starts.tolist()):
        if not start:
            continue
        keys, values = (draw(start, held.num_kv_heads, dim) for dim in (held.key_dim, held.value_dim))
        cache.write(held.index, slots(0, start, row), keys, values)
    total = int(lengths.sum())
    heads = (
        (groups * held.num_kv_heads, held.key_dim),
        (held.num_kv_heads, held.key_dim),
        (held.num_kv_heads, held.value_dim),
    )
    new = [draw(total, *shape) for shape in heads]
    found = []
    for chosen in (None, kernel):
        cache.kernel = chosen
        one = RaggedPass(
            cache,
            tables=tables,
            slots=torch.cat(
                [slots(a, b, row) for row, (a, b) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True))]
            ),
            rows=np.arange(len(ends), dtype=np.int32),
            starts=starts,
            query_lens=lengths,
            workspace=Workspace(),
        )
        found.append(one.attend(held.index, *new, options=AttentionOptions()).float())
    return float((found[0] - found[1]).abs().max())
