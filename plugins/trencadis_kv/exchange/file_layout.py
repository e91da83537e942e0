"""Format of exported blocks in a safetensors file, to move a prefix to another site or inspect it with other tools.

Each group, the blocks of one rank of one model, becomes a few tensors; row i of each is one block::

    {prefix}headers              U8  [blocks, 128]
    {prefix}layers.0.key …       [blocks, block_size, num_heads, head_dim], one for each part of the layout

Blocks that a codec changed, or whose layout has no description, have no parts::

    {prefix}encoded.headers      U8  [blocks, 128]
    {prefix}encoded.starts       I64 [blocks + 1]
    {prefix}encoded.payloads     U8  [bytes]

The metadata hold the descriptions by their keys. The file holds no tokens, and the hash of a block does not reveal
them. The row of a block that was broken, or evicted meanwhile, has a header of zeros. Imported blocks are verified like
blocks read from a store.
"""

from __future__ import annotations

from typing import Final

import attrs

from trencadis.records import KVPart

__all__ = ["ENCODED", "FORMAT", "HEADERS", "PAYLOADS", "STARTS", "Moved", "part_name"]

FORMAT: Final = "trencadis-kv-1"
"""Value of ``format`` in the metadata."""

HEADERS: Final = "headers"
ENCODED: Final = "encoded."
STARTS: Final = "encoded.starts"
PAYLOADS: Final = "encoded.payloads"
"""Names of tensors after their group's prefix; ``ENCODED`` comes before ``HEADERS``."""


@attrs.define(kw_only=True)
class Moved:
    """Result of an export or import.

    Attributes:
        num_objects: Number of blocks.
        num_bytes: Bytes of the blocks, with headers.
        num_broken: Blocks that were left out because they are broken.
    """

    num_objects: int = 0
    num_bytes: int = 0
    num_broken: int = 0


def part_name(part: KVPart) -> str:
    """Return the name of a part's tensor, without its group's prefix. Pure."""
    return f"layers.{part.layer}.{part.kind}"
