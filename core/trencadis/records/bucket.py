"""Static shapes: what a step needs, what is prepared, and the limits that bound both."""

from __future__ import annotations

import enum

import attrs

__all__ = ["Bucket", "BucketLimits", "Phase", "Shape"]


class Phase(enum.Enum):
    """Which of the two kinds of pass a shape belongs to."""

    PREFILL = "prefill"
    DECODE = "decode"


@attrs.frozen(order=True)
class Shape:
    """The size of one pass, before padding.

    Attributes:
        batch_size: Sequences.
        query_len: Most new tokens of any sequence; 1 in a decode pass without drafts.
        num_blocks: Prefill: most context blocks of any sequence, that is blocks that hold tokens computed in
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
            and self.batch_size >= shape.batch_size
            and self.query_len >= shape.query_len
            and self.num_blocks >= shape.num_blocks
        )

    @classmethod
    def of(cls, shape: Shape) -> Bucket:
        """Return the bucket of exactly this shape. Pure."""
        return cls(shape.batch_size, shape.query_len, shape.num_blocks, shape.phase)


@attrs.frozen(kw_only=True)
class BucketLimits:
    """What bounds every legal shape of an engine.

    Attributes:
        block_size: Tokens per KV block.
        max_model_len: Most tokens of a sequence, prompt and output.
        max_num_seqs: Most sequences running at once.
        max_num_batched_tokens: Token budget of a step.
        max_prefill_batch_size: Most sequences in one prefill pass.
        num_blocks: KV blocks on the device.
        contiguous: Decode passes address blocks by range: ``num_blocks`` of a decode shape counts up to the
            highest block id in use.
        prefix_caching: Prompts may start with cached blocks.
        max_draft_tokens: Most draft tokens a sequence may have in a step; 0 without speculation.
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

    @property
    def max_blocks_per_sequence(self) -> int:
        """Blocks that a sequence of ``max_model_len`` tokens occupies."""
        return -(-self.max_model_len // self.block_size)
