from __future__ import annotations

import msgspec

from trencadis_server.protocol.chat_answers import ChunkChoice, Delta


def test_a_delta_has_only_what_it_adds() -> None:
    assert msgspec.to_builtins(Delta(content="x")) == {"content": "x"}
    assert msgspec.to_builtins(Delta()) == {}


def test_a_chunk_says_null_where_the_official_client_reads_an_attribute() -> None:
    choice = msgspec.to_builtins(ChunkChoice(index=0, delta=Delta()))
    assert choice == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": None}
