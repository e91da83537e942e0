"""Attention of a ragged pass: flat tokens, sequences of any length, nothing padded but a few keys inside a group.

    with a kernel for this device (``PagedKVCache.kernel``) it does all of it, but for drafts that branch; else, and for those:

    new keys and values ─▶ cache slots
    whole prompts         attend to their own new keys: causal, nothing gathered
    everything else       is cut into pieces; alike pieces form a group: gather blocks ─▶ one fused attention
    drafts that branch    are a piece of their own: each sees the context, the drafts it follows and itself

Shapes: T tokens of the pass, S block size, H query heads, KV key-value heads, D head dimension.
"""

from __future__ import annotations

from functools import cached_property

import attrs
import numpy as np
import numpy.typing as npt
import torch

from trencadis.records import BoolArray, Int32Array
from trencadis_torch.attention.options import AttentionOptions
from trencadis_torch.attention.sdpa import attend
from trencadis_torch.attention.trees import DraftTrees
from trencadis_torch.cache.kv_cache import KernelPass, PagedKVCache
from trencadis_torch.cache.storage import decode
from trencadis_torch.device import to_device

__all__ = ["RaggedPass", "Workspace"]

MAX_PIECE = 256
"""Queries of one piece: bounds the mask, [queries, keys]."""

MAX_SHARED = 8
"""Pieces of at most this many queries share a group; longer ones keep the device busy alone."""

MAX_GATHERED = 16384
"""Keys gathered for one group of several pieces, tokens: larger temporaries cost more in page faults than they save."""

SLACK = 1.25
"""Pieces share a group if none has more than this many times the blocks of the smallest, plus one."""


class Workspace:
    """Buffers that grow and are used again: a fresh large temporary costs page faults in every layer."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def gather(self, name: str, source: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return ``source[index]`` along the first axis, valid until the next call with this name."""
        shape = (len(index), *source.shape[1:])
        size = int(np.prod(shape))
        buffer = self._buffers.get((name, source.dtype))
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(size, dtype=source.dtype, device=source.device)
            self._buffers[name, source.dtype] = buffer
        target = buffer[:size].view(shape)
        torch.index_select(source, 0, index, out=target)
        return target


@attrs.frozen(kw_only=True)
class _Group:
    """Pieces with equally many queries, attended to in one call.

    Attributes:
        tokens: Their tokens in the pass, ``[num_pieces × query_len]``; a slice where they are consecutive.
        query_len: Queries of each.
        num_pieces: How many they are.
        blocks: Blocks to gather, int64 ``[num_pieces × num_blocks]``; None: the new keys are all there is to see.
        num_keys: Number of gathered keys that any query sees; they are the first ones.
        mask: bool ``[num_pieces, 1, query_len, num_keys]``, or None.
    """

    tokens: slice | torch.Tensor
    query_len: int
    num_pieces: int = 1
    blocks: torch.Tensor | None = None
    num_keys: int = 0
    mask: torch.Tensor | None = None


class RaggedPass:
    """Attention of one ragged pass: slots of new keys and values, and the keys of each query. Made per pass, read by every layer.

    Args:
        cache: Written to.
        tables: Block tables of all rows, int32 ``[num_rows, max_blocks]`` on the device.
        slots: Where new keys go, int64 ``[T]``.
        rows: Row of each sequence, on the host.
        starts: First query position of each.
        query_lens: Queries of each; their tokens follow each other in the pass.
        workspace: Buffers to use again.
        trees: Trees of drafts that branch.

    Attributes:
        tables: Block tables of all rows.
        slots: Where new keys go.
        rows: Row of each sequence.
        starts: First query position of each.
        query_lens: Queries of each.
        trees: Trees of drafts that branch, or None.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        *,
        tables: torch.Tensor,
        slots: torch.Tensor,
        rows: Int32Array,
        starts: Int32Array,
        query_lens: Int32Array,
        workspace: Workspace,
        trees: DraftTrees | None = None,
    ) -> None:
        self._cache = cache
        self._workspace = workspace
        self._windows = {layer.index: layer.window for layer in cache.layers}
        self.tables, self.slots = tables, slots
        self.rows, self.starts, self.query_lens = rows, starts, query_lens
        self.trees = trees

    @cached_property
    def _left(self) -> BoolArray:
        """Which sequences the kernel does not attend for."""
        left = np.ones(len(self.rows), np.bool_)
        if self._cache.kernel is not None:
            left &= False if self.trees is None else self.trees.branches
        return left

    @cached_property
    def _native(self) -> KernelPass | None:
        mine = ~self._left
        if self._cache.kernel is None or not mine.any():
            return None
        firsts = np.cumsum(self.query_lens) - self.query_lens
        return self._cache.kernel.begin(
            self._cache,
            tables=self.tables,
            slots=self.slots,
            rows=self.rows[mine],
            starts=self.starts[mine],
            query_lens=self.query_lens[mine],
            firsts=firsts[mine],
        )

    @cached_property
    def _groups(self) -> dict[int, tuple[_Group, ...]]:
        arrays = (self.tables, self.rows, self.starts, self.query_lens)
        return {
            window: _plan(self._cache.block_size, *arrays, window, self.trees, self._left)
            for window in set(self._windows.values())
        }

    def attend(
        self,
        layer_index: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Store new keys and values, and return attention outputs ``[T, H, Dv]``.

        Args:
            layer_index: The module's ``layer_idx``.
            query: ``[T, H, D]``.
            keys: ``[T, KV, D]``.
            values: ``[T, KV, Dv]``.
            options: Options of the layer.
        """
        output = query.new_empty(*query.shape[:2], values.shape[-1])
        if self._native is None:
            self._cache.write(layer_index, self.slots, keys, values)
        else:
            self._native.attend(layer_index, query, keys, values, output=output, options=options)
        for group in self._groups[self._windows[layer_index]]:
            seen_keys, seen_values = self._seen(layer_index, group, keys, values)
            part = torch.unflatten(query[group.tokens], 0, (-1, group.query_len)).transpose(1, 2)
            result = attend(part, seen_keys, seen_values, mask=group.mask, options=options)
            output[group.tokens] = result.transpose(1, 2).flatten(0, 1)
        return output

    def _seen(
        self, layer_index: int, group: _Group, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if group.blocks is None:
            return keys[group.tokens].transpose(0, 1)[None], values[group.tokens].transpose(0, 1)[None]
        cached_keys, cached_values = self._cache.layer(layer_index)
        gathered = (
            self._workspace.gather("keys", cached_keys, group.blocks),
            self._workspace.gather("values", cached_values, group.blocks),
        )
        first, second = (
            decode(part, new.dtype).view(group.num_pieces, -1, *new.shape[1:])[:, : group.num_keys].transpose(1, 2)
            for part, new in zip(gathered, (keys, values), strict=True)
        )
        return first, second


def _plan(
    block_size: int,
    tables: torch.Tensor,
    rows: Int32Array,
    starts: Int32Array,
    query_lens: Int32Array,
    window: int,
    trees: DraftTrees | None,
    left: BoolArray,
) -> tuple[_Group, ...]:
    """Split the sequences of a pass that are left into groups for layers of one window. Pure."""
    firsts = np.cumsum(query_lens) - query_lens
    whole = left & (starts == 0) & (query_lens > 1)
    if window:
        whole &= query_lens <= window
    if trees is not None:
        whole &= ~trees.branches
    groups = [
        _Group(tokens=slice(first, first + size), query_len=size)
        for first, size in zip(firsts[whole].tolist(), query_lens[whole].tolist(), strict=True)
    ]
    rest = left & ~whole
    if rest.any():
        pieces = _Pieces(block_size, rows, starts, query_lens, np.flatnonzero(rest), window, trees)
        groups.extend(pieces.group(tables, chosen) for chosen in pieces.alike())
    return tuple(groups)


class _Pieces:
    """Runs of at most ``MAX_PIECE`` queries of one sequence each, or a whole tree, as parallel host arrays."""

    def __init__(
        self,
        block_size: int,
        rows: Int32Array,
        starts: Int32Array,
        query_lens: Int32Array,
        sequences: npt.NDArray[np.int64],
        window: int,
        trees: DraftTrees | None,
    ) -> None:
        most = np.full(len(rows), MAX_PIECE)
        if trees is not None:
            most = np.where(trees.branches, query_lens, most)
        firsts = np.cumsum(query_lens) - query_lens
        counts = -(-query_lens // most)[sequences]
        of = np.repeat(sequences, counts)
        offsets = (np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)) * most[of]
        self.rows = rows[of]
        self.positions = starts[of] + offsets
        self.sizes = np.minimum(most[of], query_lens[of] - offsets)
        self.tokens = firsts[of] + offsets
        ends = self.positions + self.sizes
        self.first_blocks = np.maximum(0, self.positions - window + 1) // block_size if window else 0 * ends
        self.num_blocks = -(-ends // block_size) - self.first_blocks
        self._block_size = block_size
        self._window = window
        self._trees = trees
        self._of = of

    def alike(self) -> list[npt.NDArray[np.int64]]:
        """Return indices of pieces, group by group."""
        if self._fit_together():
            return [np.arange(len(self.rows))]
        order = np.lexsort((self.num_blocks, self.sizes))
        sizes, blocks = self.sizes[order], self.num_blocks[order]
        groups, first = [], 0
        while first < len(order):
            last = first + 1
            if sizes[first] <= MAX_SHARED:
                same = int(np.searchsorted(sizes, sizes[first], side="right"))
                last = first + int(np.searchsorted(blocks[first:same], blocks[first] * SLACK + 1, side="right"))
                most = MAX_GATHERED // (int(blocks[last - 1]) * self._block_size)
                last = min(last, first + max(1, most))
            groups.append(order[first:last])
            first = last
        return groups

    def _fit_together(self) -> bool:
        most = int(self.num_blocks.max())
        return bool(
            self.sizes.max() <= MAX_SHARED
            and (self.sizes == self.sizes[0]).all()
            and most <= self.num_blocks.min() * SLACK + 1
            and most * self._block_size * len(self.rows) <= MAX_GATHERED
        )

    def group(self, tables: torch.Tensor, chosen: npt.NDArray[np.int64]) -> _Group:
        """Return the pieces of one group with their blocks and mask."""
        size, most = int(self.sizes[chosen[0]]), int(self.num_blocks[chosen].max())
        first_blocks = self.first_blocks[chosen]
        bases = self.positions[chosen] - first_blocks * self._block_size
        num_keys = int(bases.max()) + size
        facts = np.stack([self.rows[chosen], first_blocks, self.num_blocks[chosen] - 1, bases]).astype(np.int64)
        rows, firsts, lasts, offsets = to_device(facts, tables.device).unsqueeze(-1)
        # A shorter piece gathers its last block again: finite, and masked.
        columns = torch.arange(most, device=tables.device).minimum(lasts) + firsts
        mask = None
        cut = self._window and int(bases.max()) >= self._window
        if self._trees is not None and self._trees.branches[self._of[chosen]].any():
            mask = self._tree_mask(self._trees, chosen, offsets, num_keys)
        elif size > 1 or cut or int(bases.min()) != int(bases.max()):
            mask = _mask(offsets, size, num_keys, self._window)
        return _Group(
            tokens=_tokens(self.tokens[chosen], size, tables.device),
            query_len=size,
            num_pieces=len(chosen),
            blocks=tables[rows, columns].flatten().long(),
            num_keys=num_keys,
            mask=mask,
        )

    def _tree_mask(
        self, trees: DraftTrees, chosen: npt.NDArray[np.int64], offsets: torch.Tensor, num_keys: int
    ) -> torch.Tensor:
        """Return the mask of the nodes of some pieces, bool ``[n, 1, size, num_keys]``; a piece that is no tree is a chain."""
        size = int(self.sizes[chosen[0]])
        sees = np.tile(np.tri(size, dtype=np.bool_), (len(chosen), 1, 1))
        depths = np.tile(np.arange(size), (len(chosen), 1))
        for place, sequence in enumerate(self._of[chosen].tolist()):
            if trees.branches[sequence]:
                sees[place] = trees.ancestors[sequence, :size, :size]
                depths[place] = trees.depths[sequence, :size]
        return _branching_mask(
            offsets, to_device(sees, offsets.device), to_device(depths, offsets.device), num_keys, self._window
        )


def _mask(offsets: torch.Tensor, size: int, num_keys: int, window: int) -> torch.Tensor:
    """Return the mask of queries, bool ``[n, 1, size, num_keys]``, from each first query's index among its keys ``[n, 1]``."""
    queries = (offsets + torch.arange(size, device=offsets.device))[:, None, :, None]
    keys = torch.arange(num_keys, device=offsets.device)
    mask = keys <= queries
    if window:
        mask &= keys > queries - window
    return mask


def _branching_mask(
    offsets: torch.Tensor, sees: torch.Tensor, depths: torch.Tensor, num_keys: int, window: int
) -> torch.Tensor:
    """Return the mask of nodes, bool ``[n, 1, size, num_keys]``: all of the context, and of each other as ``sees`` says.

    Args:
        offsets: Index of each root among its keys, ``[n, 1]``.
        sees: Whether a node sees another one, bool ``[n, size, size]``.
        depths: Depth of each node, int64 ``[n, size]``; windows count by it.
        num_keys: Keys of each.
        window: Tokens that a query sees; 0 sees all.
    """
    places = torch.arange(num_keys, device=offsets.device) - offsets
    nodes = places.clamp(0, sees.shape[1] - 1)
    is_node = (places >= 0) & (places < sees.shape[1])
    mask = sees.gather(2, nodes[:, None].expand(-1, sees.shape[1], -1))
    mask = torch.where(is_node[:, None], mask, (places < 0)[:, None])
    if window:
        key_depths = torch.where(is_node, depths.gather(1, nodes), places)
        mask &= key_depths[:, None] > depths[:, :, None] - window
    return mask[:, None]


def _tokens(firsts: npt.NDArray[np.int64], size: int, device: torch.device) -> slice | torch.Tensor:
    if len(firsts) == 1 or (np.diff(firsts) == size).all():
        return slice(int(firsts[0]), int(firsts[-1]) + size)
    return to_device((firsts[:, None] + np.arange(size)).ravel().astype(np.int64), device)
