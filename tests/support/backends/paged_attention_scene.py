"""One layer over a paged cache, twice: with the CPU's kernel, and with the gathering it must agree with."""

from __future__ import annotations

import attrs
import numpy as np
import torch

from trencadis_torch.attention.native import compiled_kernel
from trencadis_torch.attention.options import AttentionOptions
from trencadis_torch.attention.ragged import RaggedPass, Workspace
from trencadis_torch.attention.trees import DraftTrees
from trencadis_torch.cache.kv_cache import AttentionLayer, PagedKVCache

CPU = torch.device("cpu")


def kernel():
    """The compiled kernel for caches of every data type; an error where it cannot be had."""
    return compiled_kernel()


@attrs.frozen(kw_only=True)
class Shape:
    """Of one layer; see :class:`AttentionLayer`."""

    num_kv_heads: int = 2
    groups: int = 2
    key_dim: int = 8
    value_dim: int = 8
    window: int = 0
    block_size: int = 4
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype = torch.float32

    @property
    def layer(self) -> AttentionLayer:
        return AttentionLayer(
            index=3,
            num_kv_heads=self.num_kv_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            window=self.window,
            dtype=self.cache_dtype,
        )


class Sequence:
    """Keys, values and queries of one sequence, drawn from its seed alone."""

    def __init__(self, shape: Shape, *, context: int, length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.context, self.length, end = context, length, context + length
        heads = shape.num_kv_heads
        self.keys, self.values, query = (
            torch.randn(end, count, dim, generator=generator).to(shape.dtype)
            for count, dim in ((heads, shape.key_dim), (heads, shape.value_dim), (heads * shape.groups, shape.key_dim))
        )
        self.query = query[context:]


def attend(
    shape: Shape, sequences: list[Sequence], *, native, seed: int = 0, trees=None, strided=False, device=CPU, **options
):
    """Return outputs ``[T, H, Dv]`` and the cache, on the device; blocks in an order drawn from the seed.

    ``native`` is True for the compiled kernel, False for none, or a kernel.
    """
    size = shape.block_size
    ends = [one.context + one.length for one in sequences]
    width = max(-(-end // size) for end in ends) + 1
    order = torch.randperm(width * len(ends), generator=torch.Generator().manual_seed(seed))
    tables = order.view(len(ends), width).int().to(device)
    cache = PagedKVCache(
        (shape.layer,),
        num_blocks=order.numel(),
        block_size=size,
        device=device,
        kernel=kernel() if native is True else native or None,
    )
    slots = []
    for row, one in enumerate(sequences):
        positions = torch.arange(ends[row], device=device)
        places = tables[row, positions // size].long() * size + positions % size
        cache.write(3, places[: one.context], one.keys[: one.context].to(device), one.values[: one.context].to(device))
        slots.append(places[one.context :])
    one = RaggedPass(
        cache,
        tables=tables,
        slots=torch.cat(slots),
        rows=np.arange(len(ends), dtype=np.int32),
        starts=np.array([part.context for part in sequences], np.int32),
        query_lens=np.array([part.length for part in sequences], np.int32),
        workspace=Workspace(),
        trees=trees,
    )
    new = (
        torch.cat([part.query for part in sequences]),
        torch.cat([part.keys[part.context :] for part in sequences]),
        torch.cat([part.values[part.context :] for part in sequences]),
    )
    new = tuple(part.to(device) for part in new)
    if strided:  # as a model hands them over: heads outside, tokens inside
        new = tuple(part.transpose(0, 1).contiguous().transpose(0, 1) for part in new)
    return one.attend(3, *new, options=AttentionOptions(**options)), cache


def chain_and_trees(query_lens: list[int], branching: list[bool], seed: int) -> DraftTrees:
    """Return trees of which some sequences branch; nodes hang on any earlier one."""
    generator = np.random.default_rng(seed)
    most = max(query_lens)
    parents = np.zeros((len(query_lens), most), np.int64)
    ancestors = np.zeros((len(query_lens), most, most), np.bool_)
    for one, (length, branches) in enumerate(zip(query_lens, branching, strict=True)):
        ancestors[one, 0, 0] = True
        for node in range(1, length):
            parents[one, node] = generator.integers(0, node) if branches else node - 1
            ancestors[one, node] = ancestors[one, parents[one, node]]
            ancestors[one, node, node] = True
    return DraftTrees(
        rows=np.arange(len(query_lens), dtype=np.int32),
        roots=np.zeros(len(query_lens), np.int32),
        num_drafts=np.array(query_lens, np.int32) - 1,
        branches=np.array(branching),
        parents=parents,
        ancestors=ancestors,
        depths=np.maximum(ancestors.sum(2) - 1, 0),
    )
