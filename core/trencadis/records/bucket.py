"""Static shapes: what a step needs, what is prepared, and the limits that bound both."""

from __future__ import annotations

import enum

import attrs

__all__ = ["Bucket", "BucketLimits", "Phase", "Shape", "UnifiedBucket", "UnifiedShape"]


class Phase(enum.Enum):
    """Which of the two kinds of pass a shape belongs to."""

    PREFILL = "prefill"
    DECODE = "decode"


@attrs.frozen(order=True)
class Shape:
    """The size of one pass, before padding.

    A prefill pass whose prompts follow each other in one row is ``(1, all new tokens, all context blocks)``, see
    ``BackendCapabilities.merges_prefills``.

    Attributes:
        batch_size: Sequences, each in a row of its own.
        query_len: Most new tokens of any row; 1 in a decode pass without drafts.
        num_blocks: Prefill: most context blocks of any row, that is blocks that hold tokens computed in
            earlier steps. Decode: KV blocks read by all sequences together.
        phase: Prefill or decode.
    """

    batch_size: int
    query_len: int
    num_blocks: int
    phase: Phase = attrs.field(default=Phase.PREFILL, order=False)

    @property
    def num_tokens(self) -> int:
        """Token positions: batch_size × query_len."""
        return self.batch_size * self.query_len


@attrs.frozen(order=True)
class Bucket(Shape):
    """A shape that a device prepares once and replays; same fields as :class:`Shape`."""

    def covers(self, shape: Shape) -> bool:
        """True if ``shape`` fits in every dimension and is of the same phase. Pure."""
        return (
            self.phase is shape.phase
            and not isinstance(shape, UnifiedShape)
            and self.batch_size >= shape.batch_size
            and self.query_len >= shape.query_len
            and self.num_blocks >= shape.num_blocks
        )

    @classmethod
    def of(cls, shape: Shape) -> Bucket:
        """Return the bucket of exactly this shape, a :class:`UnifiedBucket` if it is unified. Pure."""
        if isinstance(shape, UnifiedShape):
            return UnifiedBucket(shape.query_len, shape.num_blocks, shape.num_unique_blocks, shape.is_causal)
        return cls(shape.batch_size, shape.query_len, shape.num_blocks, shape.phase)


def _phase_of(shape: UnifiedShape) -> Phase:
    return Phase.PREFILL if shape.is_causal else Phase.DECODE


@attrs.frozen(order=True)
class UnifiedShape(Shape):
    """The size of a pass over a whole plan: prefills and decodes follow each other in one row of tokens.

    A sequence with one new token reads that one and all before it from the cache; one with several reads those computed
    before, and attends to the new ones directly. A block is read once for each such new token: more than once, it is
    *shared* and gathered by its id; once, it is *unique*, and all unique ones are read as one range of the cache.

    Source: vllm-gaudi v0.11.2, extension/unified_batch.py.

    Attributes:
        query_len: New tokens of all sequences together.
        num_blocks: Distinct shared blocks.
        num_unique_blocks: Blocks from the first one of the cache up to the highest unique one: its id + 1, or 0.
        is_causal: Some sequence has several new tokens.
        batch_size: 1, the row.
        phase: Prefill if causal, else decode.
    """

    query_len: int
    num_blocks: int
    num_unique_blocks: int
    is_causal: bool
    batch_size: int = attrs.field(default=1, init=False, repr=False, order=False)
    phase: Phase = attrs.field(default=attrs.Factory(_phase_of, takes_self=True), init=False, repr=False, order=False)


@attrs.frozen(order=True)
class UnifiedBucket(UnifiedShape, Bucket):
    """The bucket of a unified pass; same fields as :class:`UnifiedShape`."""

    def covers(self, shape: Shape) -> bool:
        """True if ``shape`` is unified, fits in every dimension, and is causal only if the bucket is. Pure."""
        return (
            isinstance(shape, UnifiedShape)
            and (self.is_causal or not shape.is_causal)
            and self.query_len >= shape.query_len
            and self.num_blocks >= shape.num_blocks
            and self.num_unique_blocks >= shape.num_unique_blocks
        )


@attrs.frozen(kw_only=True)
class BucketLimits:
    """What bounds every legal shape of an engine.

    Attributes:
        block_size: Tokens per KV block.
        max_model_len: Most tokens of a sequence, prompt and output.
        max_num_seqs: Most sequences running at once.
        max_num_batched_tokens: Token budget of a step.
        max_prefill_batch_size: Most rows of one prefill pass: sequences, or 1 where they are merged into a row.
        num_blocks: KV blocks on the device.
        contiguous: Decode passes address blocks by range: ``num_blocks`` of a decode shape counts up to the
            highest block id in use.
        prefix_caching: Prompts may start with cached blocks.
        max_draft_tokens: Most draft tokens a sequence may have in a step; 0 without speculation.
        max_merged_prefills: Most prompts that follow each other in a row of a prefill pass.
        unified: Every shape is a :class:`UnifiedShape`, every bucket a :class:`UnifiedBucket`.
    """

    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_batch_size: int
    num_blocks: int
    contiguous: bool
    prefix_caching: bool
    max_draft_tokens: int
    max_merged_prefills: int = 1
    unified: bool = False

    @property
    def max_blocks_per_sequence(self) -> int:
        """Blocks that a sequence of ``max_model_len`` tokens occupies."""
        return -(-self.max_model_len // self.block_size)

    @property
    def max_prefill_query_len(self) -> int:
        """Most new tokens in a row of a prefill pass."""
        return min(self.max_num_batched_tokens, self.max_merged_prefills * self.max_model_len)

    @property
    def max_context_blocks(self) -> int:
        """Most context blocks of a row of a prefill pass: each of its prompts has at least one new token."""
        return self.max_merged_prefills * -(-(self.max_model_len - 1) // self.block_size)

    @property
    def max_shared_blocks(self) -> int:
        """Most blocks that a unified pass can share."""
        return min(self.num_blocks, self.max_num_seqs * self.max_blocks_per_sequence)
