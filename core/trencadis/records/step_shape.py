"""Sizes of a step: all that a model of step times may depend on."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from trencadis.records.batch import Pass
from trencadis.records.bucket import Bucket

__all__ = ["StepShape", "step_shape"]


@attrs.frozen(kw_only=True)
class StepShape:
    """Sizes of one step.

    Attributes:
        num_decodes: Sequences with one token to compute, drafts beside it included.
        num_prefills: Sequences with several prompt tokens to compute.
        num_decode_tokens: Tokens of decodes.
        num_prefill_tokens: Tokens of prefills.
        num_decode_context: KV entries that decodes read, those of the step included.
        num_prefill_context: KV entries that prefills read, those of the step included.
        prefill_products: Sum over prefills of computed tokens times the mean number of KV entries that each reads: for q tokens after s
            computed ones ``q·s + q·(q + 1)/2``.
        num_new: Sequences that were admitted in this step.
        buckets: Buckets of its passes on a device with static shapes; empty on others.
    """

    num_decodes: int = 0
    num_prefills: int = 0
    num_decode_tokens: int = 0
    num_prefill_tokens: int = 0
    num_decode_context: int = 0
    num_prefill_context: int = 0
    prefill_products: float = 0.0
    num_new: int = 0
    buckets: tuple[Bucket, ...] = ()

    @property
    def num_rows(self) -> int:
        """Sequences in the step."""
        return self.num_decodes + self.num_prefills

    @property
    def num_tokens(self) -> int:
        """Tokens computed in the step."""
        return self.num_decode_tokens + self.num_prefill_tokens

    @property
    def num_context(self) -> int:
        """KV entries read in the step."""
        return self.num_decode_context + self.num_prefill_context


def step_shape(passes: Sequence[Pass], *, num_new: int = 0, has_buckets: bool = False) -> StepShape:
    """Return the sizes of a step. Pure.

    A sequence with one token, or with all its tokens verified as drafts, is a decode; so is the last prompt token alone.

    Args:
        passes: Passes of its batch.
        num_new: Sequences that were admitted in it.
        has_buckets: The device has static shapes: the buckets count.
    """
    num_decodes = num_decode_tokens = num_decode_context = 0
    num_prefills = num_prefill_tokens = num_prefill_context = 0
    products = 0.0
    for one in passes:
        lengths, starts = one.query_lens.astype(np.int64), one.starts.astype(np.int64)
        num_tokens, num_context = int(lengths.sum()), int(starts.sum())
        is_prefill = (lengths > 1) & (lengths != one.num_logits)
        if num_tokens > len(lengths) and is_prefill.any():
            chunks, before = lengths[is_prefill], starts[is_prefill]
            num_chunk_tokens, num_before = int(chunks.sum()), int(before.sum())
            num_prefills += len(chunks)
            num_prefill_tokens += num_chunk_tokens
            num_prefill_context += num_before + num_chunk_tokens
            products += float((chunks * before + chunks * (chunks + 1) / 2).sum())
            num_decodes -= len(chunks)
            num_tokens, num_context = num_tokens - num_chunk_tokens, num_context - num_before
        num_decodes += len(lengths)
        num_decode_tokens += num_tokens
        num_decode_context += num_context + num_tokens
    return StepShape(
        num_decodes=num_decodes,
        num_prefills=num_prefills,
        num_decode_tokens=num_decode_tokens,
        num_prefill_tokens=num_prefill_tokens,
        num_decode_context=num_decode_context,
        num_prefill_context=num_prefill_context,
        prefill_products=products,
        num_new=num_new,
        buckets=tuple(one.bucket for one in passes) if has_buckets else (),
    )
