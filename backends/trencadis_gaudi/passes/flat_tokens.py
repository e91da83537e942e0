"""Tokens of a pass concatenated in one row and padded to the bucket. NumPy on the host, pure.

Shapes: n sequences, T tokens of the bucket.
"""

from __future__ import annotations

import attrs
import numpy as np

from trencadis.errors import StepFailedError
from trencadis.records import Int32Array, Int64Array, Pass
from trencadis_gaudi.flat_cache import FlatKVCache

__all__ = ["FlatTokens", "flat_tokens"]


@attrs.frozen(kw_only=True)
class FlatTokens:
    """Tokens of a pass; parallel arrays, int64 ``[T]``.

    Attributes:
        groups: Index of the sequence of each token in the pass; -1 in padding.
        positions: Position of each token in its sequence; 0 in padding.
        slots: Slot of each token's keys and values; padding uses the slots of the padding block in turn.
        firsts: Index of each sequence's first token, int64 ``[n]``.
    """

    groups: Int64Array
    positions: Int64Array
    slots: Int64Array
    firsts: Int64Array


def flat_tokens(one: Pass, tables: Int32Array, cache: FlatKVCache, *, num_tokens: int) -> FlatTokens:
    """Return the tokens of a pass.

    Args:
        one: Pass with the tokens.
        tables: Block tables of all rows, int32 ``[num_rows, num_columns]``.
        cache: Cache, read for sizes only.
        num_tokens: Token positions of the bucket, T.

    Raises:
        StepFailedError: The pass has more tokens than the bucket.
    """
    total, size = int(one.query_lens.sum()), cache.block_size
    if total > num_tokens:
        raise StepFailedError(
            f"a row of {num_tokens} tokens has no room for the {total} tokens of its pass.",
            hint="A bucketing strategy must return a bucket that covers the pass.",
        )
    firsts = (np.cumsum(one.query_lens) - one.query_lens).astype(np.int64)
    groups = np.full(num_tokens, -1, np.int64)
    positions = np.zeros(num_tokens, np.int64)
    slots = cache.padding_block * size + np.arange(num_tokens, dtype=np.int64) % size
    owners = groups[:total] = np.repeat(np.arange(len(one.rows)), one.query_lens)
    places = positions[:total] = np.arange(total) + (one.starts - firsts)[owners]
    slots[:total] = tables[one.rows[owners], places // size].astype(np.int64) * size + places % size
    return FlatTokens(groups=groups, positions=positions, slots=slots, firsts=firsts)
