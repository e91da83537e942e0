from __future__ import annotations

import pytest

from trencadis.errors import OutOfMemoryError
from trencadis_gaudi.memory import format_bytes, share_memory

GIB = 2**30
LLAMA_3_8B_BLOCK = 16 * 2**20
"""2 · 32 layers · 128 tokens · 8 heads · 128 elements · 2 bytes."""


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0 B"),
        (1024, "1024 B"),
        (1025, "1.001 KiB"),
        (-252 * 1024, "-252 KiB"),
        (79.16 * GIB, "79.16 GiB"),
        (11.095 * GIB, "11.1 GiB"),
        (3 * 1024 * 2**40, "3072 TiB"),
    ],
)
def test_amounts_have_four_digits_in_the_largest_unit_that_leaves_1024_or_less(amount, text):
    assert format_bytes(amount) == text


@pytest.mark.parametrize(
    ("free", "utilization", "reserve", "usable", "graphs", "cache", "margin"),
    [
        (79.16, 0.5, 0.4, "39.58 GiB", "15.83 GiB", "23.75 GiB", "39.58 GiB"),
        (50.0, 0.9, 0.1, "45 GiB", "4.5 GiB", "40.5 GiB", "5 GiB"),
        (79.22, 0.9, 0.1, "71.3 GiB", "7.13 GiB", "64.17 GiB", "7.922 GiB"),
    ],
)
def test_the_vendors_examples_are_shared_out_alike(free, utilization, reserve, usable, graphs, cache, margin):
    shares = share_memory(int(free * GIB), utilization=utilization, graph_reserve=reserve)
    parts = (shares.usable_bytes, shares.graph_bytes, shares.kv_bytes, shares.margin_bytes)
    assert [format_bytes(part) for part in parts] == [usable, graphs, cache, margin]


def test_the_example_pays_for_1519_blocks():
    shares = share_memory(int(79.16 * GIB), utilization=0.5, graph_reserve=0.4)
    assert shares.num_blocks(LLAMA_3_8B_BLOCK) == 1519
    with_padding = share_memory(int(79.16 * GIB), utilization=0.5, graph_reserve=0.4, padding_bytes=LLAMA_3_8B_BLOCK)
    assert with_padding.num_blocks(LLAMA_3_8B_BLOCK) == 1518


def test_the_shares_are_the_whole():
    shares = share_memory(7_777_777_777, utilization=0.73, graph_reserve=0.21)
    assert shares.usable_bytes + shares.margin_bytes == pytest.approx(7_777_777_777, abs=2)
    assert shares.graph_bytes + shares.kv_bytes == pytest.approx(shares.usable_bytes, abs=2)


def test_a_cache_without_room_for_a_block_is_refused_with_the_amounts():
    shares = share_memory(2**20, utilization=0.5, graph_reserve=0.0)
    with pytest.raises(OutOfMemoryError, match="512 KiB for the KV cache do not pay for one block of 16 MiB"):
        shares.num_blocks(LLAMA_3_8B_BLOCK)


def test_the_log_line_is_the_vendors():
    shares = share_memory(50 * GIB, utilization=0.9, graph_reserve=0.1, padding_bytes=GIB // 2)
    assert str(shares) == (
        "Free device memory: 50 GiB, 45 GiB usable (gpu_memory_utilization=0.9), 4.5 GiB reserved for HPUGraphs "
        "(VLLM_GRAPH_RESERVED_MEM=0.1), 512 MiB reserved for KV cache dummy block 40 GiB reserved for usable KV cache"
    )
