from __future__ import annotations

import json

import pytest

from trencadis.errors import ConfigError
from trencadis_tools.bench.block_trace import BlockRequest, parse_block_trace


def lines(*rows: tuple[float, list[int]]) -> str:
    return "\n".join(json.dumps({"timestamp": when, "hash_ids": ids, "input_length": 9}) for when, ids in rows)


def test_requests_come_by_arrival_counted_from_the_first() -> None:
    text = lines((5000, [0, 1]), (2000, [0, 2])) + "\n\n"
    assert parse_block_trace(text, "t") == (BlockRequest(0.0, (0, 2)), BlockRequest(3.0, (0, 1)))


def test_request_without_blocks_is_kept() -> None:
    assert parse_block_trace(lines((0, []), (1, [4])), "t")[0].contents == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"timestamp": 0}', "t: line 1 is no request with block hashes: no 'hash_ids'"),
        ('\n{"timestamp": 0, "hash_ids": ["x"]}', "t: line 2 is no request"),
        ("TIMESTAMP,ContextTokens", "t: line 1 is no request"),
        ("[1]", "t: line 1 is no request"),
        ("", "t: holds no block"),
        (lines((0, [])), "t: holds no block"),
        (lines((0, [0, 1]), (1, [2, 1])), "t: block 1 follows block 0 and block 2"),
        (lines((0, [0, 1]), (1, [1])), "t: block 1 follows block 0 and nothing"),
        (lines((0, [3, 4, 3])), "t: block 3 follows nothing and block 4"),
    ],
)
def test_other_text_is_refused_in_words(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_block_trace(text, "t")
