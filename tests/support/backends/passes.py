"""Passes as an engine plans them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trencadis.records import Bucket, Int32Array, Pass


def ints(*values: int) -> Int32Array:
    return np.array(values, np.int32)


def make_pass(
    bucket: Bucket | None,
    rows: Sequence[int],
    starts: Sequence[int],
    query_lens: Sequence[int],
    num_logits: Sequence[int] | None = None,
    num_prompt_logits: Sequence[int] | None = None,
    *,
    indices: Sequence[int] | None = None,
) -> Pass:
    """Return a pass over sequences, each of which needs logits of its last query unless another number is said."""
    count = len(rows)
    return Pass(
        bucket=bucket or Bucket(count, max(query_lens), 0),
        indices=ints(*(range(count) if indices is None else indices)),
        rows=ints(*rows),
        starts=ints(*starts),
        query_lens=ints(*query_lens),
        num_logits=ints(*([1] * count if num_logits is None else num_logits)),
        num_prompt_logits=ints(*([0] * count if num_prompt_logits is None else num_prompt_logits)),
    )
