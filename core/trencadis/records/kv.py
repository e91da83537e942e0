"""What the bytes of a KV block mean, and what became of a transfer."""

from __future__ import annotations

from enum import StrEnum

import attrs

__all__ = ["KVLayout", "KVPart", "TransferCause"]


@attrs.frozen(kw_only=True)
class KVPart:
    """One array of a KV block: keys or values of one layer.

    Attributes:
        layer: Layer of the model, counted from 0.
        kind: Kind of content, such as ``key`` or ``value``.
        num_heads: KV heads held here.
        head_dim: Elements of one head.
        dtype: Data type of one element, such as ``float32``.
        item_bytes: Size of one element, in bytes.
    """

    layer: int
    kind: str
    num_heads: int
    head_dim: int
    dtype: str
    item_bytes: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        return self.num_heads * self.head_dim * self.item_bytes


@attrs.frozen(kw_only=True)
class KVLayout:
    """The bytes of one KV block: its parts one after the other, each ``[block_size, num_heads, head_dim]``, C order.

    Attributes:
        parts: In the order of their bytes: keys of all layers, then values of all layers.
        block_size: Tokens per block.
        first_head: First KV head held here, counted over all ranks; a tensor-parallel rank holds a range.
        last_head: One past the last.
        rotated: True if keys are held with their rotary embedding applied.
        numerics: Whose low bits these are, such as ``torch-cpu``: kernels of another device differ in them.
        sums: Names the order in which ranks that share a layer sum, on which low bits depend, too, such as ``+tp2``; empty: one rank
            computes a layer.
    """

    parts: tuple[KVPart, ...]
    block_size: int
    first_head: int = 0
    last_head: int
    rotated: bool = True
    numerics: str
    sums: str = ""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.block_size * sum(part.token_bytes for part in self.parts)

    @property
    def layers(self) -> tuple[int, ...]:
        """Whose parts these are, in the order of the first ones."""
        return tuple(dict.fromkeys(part.layer for part in self.parts))

    def layer_bytes(self, layer: int) -> int:
        """Return the bytes of one layer of a block: its parts one after the other, in their order. Pure."""
        return self.block_size * sum(part.token_bytes for part in self.parts if part.layer == layer)


class TransferCause(StrEnum):
    """Why a transfer did not do what was asked. The words are those of logs and metrics."""

    EVICTED = "evicted"
    DEADLINE = "deadline"
    UNREACHABLE = "unreachable"
    CORRUPT = "corrupt"
    INCOMPATIBLE = "incompatible"
    FULL = "full"
    LOST = "lost"
    RAISED = "raised"
    CANCELLED = "cancelled"
