"""Sizes of a block follow from its parts, and causes are words of logs and metrics."""

from __future__ import annotations

from trencadis.records import KVLayout, KVPart


def test_bytes_of_a_block_are_those_of_its_parts_times_its_tokens() -> None:
    keys = KVPart(layer=0, kind="key", num_heads=2, head_dim=8, dtype="bfloat16", item_bytes=2)
    values = KVPart(layer=0, kind="value", num_heads=2, head_dim=4, dtype="float32", item_bytes=4)
    layout = KVLayout(parts=(keys, values), block_size=16, last_head=2, numerics="torch-cpu")
    assert (keys.token_bytes, values.token_bytes) == (32, 32)
    assert layout.block_bytes == 16 * 64
