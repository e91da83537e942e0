"""Shards of blocks: the layers and KV heads of a block that one object holds, and the ranks that read and write it.

A shard is named by its ranges, not by the rank that wrote it, so that engines with other parallel layouts can read it:

    KV heads        0     1     2     3
    head_groups 4   0-1 │ 1-2 │ 2-3 │ 3-4     shards of each range of layers
    tensor 2        rank 0    │ rank 1        two shards each
    tensor 4        0   │ 1   │ 2   │ 3       one each

Ranks that hold the same heads read the same shards; the first of them writes. If a shard holds more than a rank, the
rank reads its part.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from trencadis.errors import ConfigValueError
from trencadis.records import KVLayout, KVPart
from trencadis_kv.store.objects import BlockObjects

__all__ = ["RankShard", "Shard", "ShardPlace", "cut_blocks", "shards_of_ranks"]


@attrs.frozen(kw_only=True)
class Shard:
    """The range of layers and KV heads of a block that one object of a store holds.

    Attributes:
        layout: KV layout of the object's bytes.
        readers: Ranks that hold a part of it.
        writer: The first rank that holds all of it; -1: none does.
        namespace: Namespace of its objects; empty: that of the settings.
    """

    layout: KVLayout
    readers: tuple[int, ...]
    writer: int
    namespace: str = ""


def cut_blocks(
    layouts: Sequence[KVLayout],
    *,
    head_groups: int = 0,
    layer_starts: Sequence[int] = (),
    saves: bool = True,
    table: str = "kv_connector",
) -> list[Shard]:
    """Return the shards that make up a block, those of the first layers first. Pure.

    Args:
        layouts: KV layout of each rank's part of a block, by rank.
        head_groups: Number of equal ranges of heads, at most one for each head; 0: as the ranks hold them, and kept
            apart from those of ranks that sum in another order.
        layer_starts: First layers of the ranges, with or without 0; empty: as the stages hold them.
        saves: Whether each shard must have a rank that writes it.
        table: Name of the config table, for messages.

    Raises:
        ConfigValueError: The heads, or the ranks' parts of a block, cannot be split so.
    """
    layers = sorted({layer for one in layouts for layer in one.layers})
    firsts = sorted({0, *layer_starts} if layer_starts else {min(one.layers) for one in layouts})
    spans = [
        [layer for layer in layers if a <= layer < b]
        for a, b in zip(firsts, [*firsts[1:], layers[-1] + 1], strict=True)
    ]
    heads = _head_ranges(layouts, head_groups, table)
    shards = [_shard(layouts, span, first, last) for span in spans if span for first, last in heads]
    if head_groups:
        shards = [attrs.evolve(one, layout=attrs.evolve(one.layout, sums="")) for one in shards]
    if saves:
        _check_writers(layouts, shards, table)
    return shards


def shards_of_ranks(layouts: Sequence[KVLayout]) -> list[Shard]:
    """Return the shards for stores that each rank has to itself: the rank's part of a block, in a namespace of the rank. Pure."""
    return [
        Shard(layout=layout, readers=(rank,), writer=rank, namespace=f"rank{rank}")
        for rank, layout in enumerate(layouts)
    ]


class ShardPlace:
    """Maps the bytes of a shard to those of a rank's block; other shards have the rest.

    Args:
        block: Layout of the block.
        shard: KV layout of the shard; parts that the block does not hold are left out.
    """

    def __init__(self, block: KVLayout, shard: KVLayout) -> None:
        self._block_size = block.block_size
        self._pieces: list[tuple[KVPart, int, slice, KVPart, int, slice]] = []
        first, last = max(block.first_head, shard.first_head), min(block.last_head, shard.last_head)
        starts = {(part.layer, part.kind): (part, start) for part, start in _starts(shard)}
        for part, start in _starts(block):
            if (part.layer, part.kind) in starts:
                inner, inner_start = starts[part.layer, part.kind]
                of_block = slice(first - block.first_head, last - block.first_head)
                of_shard = slice(first - shard.first_head, last - shard.first_head)
                if part.num_heads != block.last_head - block.first_head:  # layers differ: nothing is cut by heads
                    of_block = of_shard = slice(None)
                self._pieces.append((part, start, of_block, inner, inner_start, of_shard))

    def read(self, blocks: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
        """Copy the shard's bytes out of blocks.

        Args:
            blocks: Blocks of the rank, uint8 ``[n, block_bytes]``.
            out: Destination, uint8 ``[n, bytes of the shard]``.
        """
        for part, start, heads, inner, inner_start, inner_heads in self._pieces:
            self._heads(out, inner, inner_start)[:, :, inner_heads] = self._heads(blocks, part, start)[:, :, heads]

    def write(self, data: NDArray[np.uint8], blocks: NDArray[np.uint8]) -> None:
        """Copy the shard's bytes into blocks.

        Args:
            data: Bytes of the shard, uint8 ``[n, bytes of the shard]``.
            blocks: Blocks of the rank, uint8 ``[n, block_bytes]``.
        """
        for part, start, heads, inner, inner_start, inner_heads in self._pieces:
            self._heads(blocks, part, start)[:, :, heads] = self._heads(data, inner, inner_start)[:, :, inner_heads]

    def _heads(self, rows: NDArray[np.uint8], part: KVPart, start: int) -> NDArray[np.uint8]:
        """Return a view of one part of blocks, ``[n, block_size, num_heads, bytes of a head]``."""
        size = self._block_size * part.token_bytes
        return rows[:, start : start + size].reshape(
            len(rows), self._block_size, part.num_heads, part.head_dim * part.item_bytes
        )


@attrs.frozen(kw_only=True)
class RankShard:
    """A shard on one rank.

    Attributes:
        objects: Packs and unpacks its objects.
        place: Place of the shard in the rank's blocks; None: they are the same bytes.
    """

    objects: BlockObjects
    place: ShardPlace | None = None

    @classmethod
    def of(cls, shard: Shard, block: KVLayout, objects: BlockObjects) -> RankShard:
        """Return a shard on a rank whose blocks have the layout ``block``. Pure."""
        is_same = attrs.evolve(shard.layout, sums=block.sums) == block
        return cls(objects=objects, place=None if is_same else ShardPlace(block, shard.layout))


def _starts(layout: KVLayout) -> list[tuple[KVPart, int]]:
    """Return the parts of a block, and where each begins."""
    found, start = [], 0
    for part in layout.parts:
        found.append((part, start))
        start += layout.block_size * part.token_bytes
    return found


def _head_ranges(layouts: Sequence[KVLayout], number: int, table: str) -> list[tuple[int, int]]:
    if not number:
        return sorted({(one.first_head, one.last_head) for one in layouts})
    num_heads = max(one.last_head for one in layouts)
    number = min(number, num_heads)
    if num_heads % number or (number > 1 and any(_differ(one) for one in layouts)):
        legal = [str(n) for n in range(1, num_heads + 1) if not num_heads % n]
        raise ConfigValueError(
            f"[{table}] head_groups = {number}: the model has {num_heads} KV heads, in layers that "
            f"{'differ' if any(_differ(one) for one in layouts) else 'are alike'}, which do not go into so many ranges.",
            hint=f"Set it to {'1' if any(_differ(one) for one in layouts) else 'one of: ' + ', '.join(legal)}.",
        )
    size = num_heads // number
    return [(first, first + size) for first in range(0, num_heads, size)]


def _differ(layout: KVLayout) -> bool:
    """Return whether layers have other numbers of heads than the block."""
    return any(part.num_heads != layout.last_head - layout.first_head for part in layout.parts)


def _shard(layouts: Sequence[KVLayout], layers: Sequence[int], first: int, last: int) -> Shard:
    readers = [
        rank
        for rank, one in enumerate(layouts)
        if not set(layers).isdisjoint(one.layers) and one.first_head < last and first < one.last_head
    ]
    holders = [rank for rank in readers if set(layers) <= set(layouts[rank].layers)]
    found = {
        (part.kind, part.layer): (part, layouts[rank]) for rank in reversed(readers) for part in layouts[rank].parts
    }
    # In the order of a rank that has these layers; if none has all, all keys before all values.
    kinds = dict.fromkeys(part.kind for part in layouts[readers[0]].parts)
    names = [(part.kind, part.layer) for rank in holders[:1] for part in layouts[rank].parts]
    names = names or [(kind, layer) for kind in kinds for layer in layers]
    parts = [
        part if _differ(whole) else attrs.evolve(part, num_heads=last - first)
        for part, whole in (found[name] for name in names if name in found and name[1] in layers)
    ]
    writers = [rank for rank in holders if layouts[rank].first_head <= first and last <= layouts[rank].last_head]
    layout = attrs.evolve(layouts[readers[0]], parts=tuple(parts), first_head=first, last_head=last)
    return Shard(layout=layout, readers=tuple(readers), writer=min(writers, default=-1))


def _check_writers(layouts: Sequence[KVLayout], shards: Sequence[Shard], table: str) -> None:
    for shard in shards:
        if shard.writer >= 0:
            continue
        first, last = min(shard.layout.layers), max(shard.layout.layers)
        num_ranges = len({(one.first_head, one.last_head) for one in layouts})
        starts = sorted({min(one.layers) for one in layouts})
        raise ConfigValueError(
            f"[{table}] head_groups and layer_starts: no rank holds all of KV heads {shard.layout.first_head} to "
            f"{shard.layout.last_head - 1} in layers {first} to {last}, so that none can save them.",
            hint=f"Set head_groups to a multiple of {num_ranges}, and name {starts} among layer_starts; or saves = false, to only load.",
        )
