"""Shapes of the passes of a draft model, whose sequences share no block."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from trencadis.interfaces import BackendCapabilities, BucketingStrategy
from trencadis.records import Bucket, Phase, Shape, UnifiedShape

__all__ = ["Buckets", "Extent", "shape_of"]


@attrs.frozen
class Extent:
    """Work of one sequence in a pass.

    Attributes:
        start: Tokens computed before.
        length: New tokens, at least 1.
        blocks: All its blocks, in order.
    """

    start: int
    length: int
    blocks: Sequence[int]


def shape_of(extents: Sequence[Extent], phase: Phase, capabilities: BackendCapabilities, *, block_size: int) -> Shape:
    """Return the shape of a pass. Pure.

    Args:
        extents: Sequences of the pass, at least one; one alone in a prefill of a padded layout.
        phase: Phase of a padded or ragged pass.
        capabilities: Capabilities of the backend.
        block_size: Tokens per block.
    """
    lengths = [extent.length for extent in extents]
    if capabilities.layout == "unified":
        return _unified(extents, block_size)
    if phase is Phase.PREFILL:
        return Shape(len(extents), max(lengths), max(-(-extent.start // block_size) for extent in extents))
    read = [extent.blocks[: -(-(extent.start + extent.length) // block_size)] for extent in extents]
    num_blocks = 1 + max(map(max, read)) if capabilities.contiguous else sum(map(len, read))
    return Shape(len(extents), max(lengths), num_blocks, Phase.DECODE)


def _unified(extents: Sequence[Extent], block_size: int) -> UnifiedShape:
    """Return the shape of a unified pass: blocks that several new tokens of a sequence read are shared ones."""
    num_shared, last_unique = 0, -1
    for extent in extents:
        num_cached = extent.start if extent.length > 1 else extent.start + 1
        read = extent.blocks[: -(-num_cached // block_size)]
        if extent.length > 1:
            num_shared += len(read)
        else:
            last_unique = max(last_unique, *read)
    return UnifiedShape(
        query_len=sum(extent.length for extent in extents),
        num_blocks=num_shared,
        num_unique_blocks=1 + last_unique,
        is_causal=any(extent.length > 1 for extent in extents),
    )


class Buckets:
    """Finds buckets as the engine does, but takes a larger one that is prepared before one that is not.

    Args:
        strategy: The engine's; None: every shape as it comes.
        prepared: Buckets that the backend has ready.
    """

    def __init__(self, strategy: BucketingStrategy | None = None, prepared: Sequence[Bucket] = ()) -> None:
        self._strategy = strategy
        self._prepared = frozenset(prepared)
        self._found: dict[Shape, Bucket] = {}

    def bucket_for(self, shape: Shape) -> Bucket:
        """Return a bucket that covers a shape."""
        if self._strategy is None:
            return Bucket.of(shape)
        found = self._found.get(shape)
        if found is None:
            own = self._strategy.bucket_for(shape)
            covering = (bucket for bucket in self._prepared if bucket.covers(shape))
            if own not in self._prepared:
                own = min(covering, key=lambda bucket: (bucket.num_tokens, bucket.num_blocks), default=own)
            found = self._found[shape] = own
        return found
