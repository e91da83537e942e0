"""Where prompts are cut, and which blocks make a chunk."""

from __future__ import annotations

import numpy as np
import pytest

from trencadis.records import Request
from trencadis_plugins.kv_connector import blend_chunks
from trencadis_plugins.kv_connector.blend_chunks import WantedChunks, cut
from trencadis_plugins.kv_connector.blend_index import chunk_key

TOKENS = np.arange(100, 200, dtype=np.int32)
HASHES = [bytes([i]) * 32 for i in range(25)]


@pytest.mark.parametrize(
    ("length", "expected"),
    [(0, []), (9, []), (10, [(0, 10)]), (32, [(0, 32)]), (41, [(0, 32)]), (42, [(0, 32), (32, 42)])],
)
def test_prompts_are_cut_every_so_many_tokens_and_short_ends_are_left_out(length, expected):
    assert cut(TOKENS[:length], chunk_tokens=32, min_tokens=10) == expected


def test_separators_cut_first_and_stay_at_the_end_of_what_they_end():
    tokens = TOKENS.copy()
    tokens[[20, 45, 46]] = 1
    tokens[[21, 47]] = 2
    assert cut(tokens, chunk_tokens=40, min_tokens=10, separator=(1, 2)) == [(0, 22), (22, 48), (48, 88), (88, 100)]
    assert cut(tokens, chunk_tokens=200, min_tokens=10, separator=(5,)) == [(0, 100)]
    assert cut(tokens[:1], chunk_tokens=40, min_tokens=1, separator=(1, 2)) == [(0, 1)]


def wanted(**more):
    return WantedChunks(**{"block_size": 4, "chunk_tokens": 32, "min_tokens": 8, **more})


def request(**more):
    return Request(request_id="r", prompt_token_ids=TOKENS.tolist(), **more)


def test_blocks_of_a_chunk_are_asked_for_with_their_places():
    chunks = wanted()
    chunks.want(request(), TOKENS, HASHES, is_kept=lambda *_: False)
    first, second = chunks.computed([7, 3, 9], [HASHES[7], HASHES[8], HASHES[9]])
    assert (first.places, first.blocks, first.num_blocks, first.position) == ([7], [7], 8, 0)
    assert (second.places, second.blocks, second.num_blocks, second.position) == ([0, 1], [3, 9], 8, 32)
    assert first.key == chunk_key(("", ""), TOKENS[:32])
    assert chunks.computed([1], [b"x" * 32]) == []


def test_block_in_which_one_chunk_ends_and_another_begins_belongs_to_both():
    tokens = TOKENS.copy()
    tokens[17] = 1
    chunks = wanted(separator=(1,))
    chunks.want(request(), tokens, HASHES, is_kept=lambda *_: False)
    one, two = chunks.computed([5], [HASHES[4]])
    assert (one.places, one.num_tokens, one.num_blocks) == ([4], 18, 5)
    assert (two.places, two.position, two.num_blocks) == ([0], 18, 9)


def test_only_what_lies_in_full_blocks_and_is_not_kept_yet_is_wanted():
    chunks = wanted()
    kept = chunk_key(("", ""), TOKENS[:32])
    chunks.want(request(), TOKENS, HASHES[:17], is_kept=lambda _, key: key == kept)
    assert [chunk.position for chunk in chunks._by_number.values()] == [32]


def test_chunk_is_wanted_once_and_from_the_newest_prompt():
    chunks = wanted()
    chunks.want(request(), TOKENS, HASHES, is_kept=lambda *_: False)
    chunks.want(request(), TOKENS, HASHES, is_kept=lambda *_: False)
    assert len(chunks) == 3
    others = [bytes([100 + i]) * 32 for i in range(25)]
    chunks.want(request(), TOKENS, others, is_kept=lambda *_: False)
    assert chunks.computed([1], [HASHES[0]]) == [], "whoever was to compute it may be gone"
    (order,) = chunks.computed([1], [others[0]])
    chunk = chunks.take(order.number)
    assert chunk.token_ids.tolist() == TOKENS[:32].tolist()
    assert chunks.take(order.number) is None
    assert chunks.computed([1], [others[0]]) == []


def test_chunks_of_prompts_that_never_come_are_forgotten(monkeypatch):
    monkeypatch.setattr(blend_chunks, "_MAX_WANTED", 3)
    chunks = wanted()
    for start in range(6):
        chunks.want(request(), TOKENS[start:] + start, HASHES[:8], is_kept=lambda *_: False)
    assert len(chunks) <= 3
    assert sum(map(len, chunks._of_block.values())) == 8 * len(chunks)
