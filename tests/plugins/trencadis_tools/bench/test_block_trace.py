from __future__ import annotations

import json

from trencadis_tools.bench.block_trace import BlockRequest, parse_block_trace


def lines(*rows: tuple[float, list[int]]) -> str:
    return "\n".join(json.dumps({"timestamp": when, "hash_ids": ids, "input_length": 9}) for when, ids in rows)


def test_requests_come_by_arrival_counted_from_the_first() -> None:
    text = lines((5000, [0, 1]), (2000, [0, 2])) + "\n\n"
    assert parse_block_trace(text, "t") == (BlockRequest(0.0, (0, 2)), BlockRequest(3.0, (0, 1)))


def test_request_without_blocks_is_kept() -> None:
    assert parse_block_trace(lines((0, []), (1, [4])), "t")[0].contents == ()
