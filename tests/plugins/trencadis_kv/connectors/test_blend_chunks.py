"""Where prompts are cut, and which blocks make a chunk."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from trencadis_kv.connectors.blend import chunks as blend_chunks
from trencadis_kv.connectors.blend.chunks import WantedChunks, cut
from trencadis_kv.connectors.blend.index import chunk_key
from trencadis_kv.connectors.blend.prompt import PromptTokens

TOKENS = np.arange(100, 200, dtype=np.int32)
HASHES = [bytes([i]) * 32 for i in range(25)]
ME = ""


def spans_of(tokens, **options):
    return [span for spans in cut(PromptTokens(tokens, len(tokens)), **options) for span in spans]


@pytest.mark.parametrize(
    ("length", "expected"),
    [(0, []), (9, []), (10, [(0, 10)]), (32, [(0, 32)]), (41, [(0, 32)]), (42, [(0, 32), (32, 42)])],
)
def test_prompts_are_cut_every_so_many_tokens_and_short_ends_are_left_out(length, expected):
    assert spans_of(TOKENS[:length], chunk_tokens=32, min_tokens=10) == expected


def test_separators_cut_first_and_stay_at_the_end_of_what_they_end():
    tokens = TOKENS.copy()
    tokens[[20, 45, 46]] = 1
    tokens[[21, 47]] = 2
    assert spans_of(tokens, chunk_tokens=40, min_tokens=10, separator=(1, 2)) == [
        (0, 22),
        (22, 48),
        (48, 88),
        (88, 100),
    ]
    assert spans_of(tokens, chunk_tokens=200, min_tokens=10, separator=(5,)) == [(0, 100)]
    assert spans_of(tokens[:1], chunk_tokens=40, min_tokens=1, separator=(1, 2)) == [(0, 1)]


def cut_at_once(tokens, *, chunk_tokens, min_tokens, separator):
    """The definition: first at separators, each part then from its beginning."""
    size = len(separator)
    ends = [i for i in range(size, len(tokens) + 1) if size and tuple(tokens[i - size : i]) == separator]
    spans, start = [], 0
    for end in [*ends, len(tokens)]:
        spans += [(first, min(first + chunk_tokens, end)) for first in range(start, end, chunk_tokens)]
        start = end
    return [span for span in spans if span[1] - span[0] >= min_tokens]


@settings(phases=(Phase.explicit, Phase.generate), max_examples=300)
@given(
    tokens=st.lists(st.integers(0, 2), max_size=60),
    piece=st.integers(1, 20),
    separator=st.lists(st.integers(0, 2), max_size=3).map(tuple),
    chunk_tokens=st.integers(1, 20),
    min_tokens=st.integers(1, 5),
)
def test_chunks_do_not_depend_on_the_pieces_a_prompt_is_read_in(tokens, piece, separator, chunk_tokens, min_tokens):
    options = {"chunk_tokens": chunk_tokens, "min_tokens": min_tokens, "separator": separator}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blend_chunks, "PIECE_TOKENS", piece)
        assert spans_of(tokens, **options) == cut_at_once(tokens, **options)


def wanted(**more):
    return WantedChunks(**{"block_size": 4, "chunk_tokens": 32, "min_tokens": 8, **more})


def want(chunks, tokens, hashes, is_kept=lambda *_: False):
    """Note all chunks of a prompt's full blocks; return the work of each part."""
    return list(chunks.want(ME, PromptTokens(tokens, min(len(tokens), 4 * len(hashes))), hashes, is_kept=is_kept))


def test_blocks_of_a_chunk_are_asked_for_with_their_places():
    chunks = wanted()
    want(chunks, TOKENS, HASHES)
    first, second = chunks.computed([7, 3, 9], [HASHES[7], HASHES[8], HASHES[9]])
    assert (first.places, first.blocks, first.num_blocks, first.position) == ([7], [7], 8, 0)
    assert (second.places, second.blocks, second.num_blocks, second.position) == ([0, 1], [3, 9], 8, 32)
    assert first.key == chunk_key(ME, TOKENS[:32])
    assert chunks.computed([1], [b"x" * 32]) == []


def test_block_in_which_one_chunk_ends_and_another_begins_belongs_to_both():
    tokens = TOKENS.copy()
    tokens[17] = 1
    chunks = wanted(separator=(1,))
    want(chunks, tokens, HASHES)
    one, two = chunks.computed([5], [HASHES[4]])
    assert (one.places, one.num_tokens, one.num_blocks) == ([4], 18, 5)
    assert (two.places, two.position, two.num_blocks) == ([0], 18, 9)


def test_only_what_lies_in_full_blocks_and_is_not_kept_yet_is_wanted():
    chunks = wanted()
    kept = chunk_key(ME, TOKENS[:32])
    want(chunks, TOKENS, HASHES[:17], is_kept=lambda _, key: key == kept)
    assert [chunk.position for chunk in chunks._by_number.values()] == [32]


def test_chunk_is_wanted_once_and_from_the_newest_prompt():
    chunks = wanted()
    want(chunks, TOKENS, HASHES)
    want(chunks, TOKENS, HASHES)
    assert len(chunks) == 3
    others = [bytes([100 + i]) * 32 for i in range(25)]
    want(chunks, TOKENS, others)
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
        want(chunks, TOKENS[start:] + start, HASHES[:8])
    assert len(chunks) <= 3
    assert sum(map(len, chunks._of_block.values())) == 8 * len(chunks)


def test_prompts_that_begin_alike_do_not_pile_up_in_a_block(monkeypatch):
    monkeypatch.setattr(blend_chunks, "_MAX_SHARING", 3)
    chunks = wanted()
    for i in range(10):
        tokens = TOKENS.copy()
        tokens[20] = i
        want(chunks, tokens, [*HASHES[:5], *(bytes([100 + i, k]) * 16 for k in range(3))])
    orders = chunks.computed([5], [HASHES[0]])
    assert [chunks.take(order.number).token_ids[20] for order in orders] == [7, 8, 9]
    assert not chunks._of_block


def test_work_that_is_told_covers_all_that_was_read_and_hashed():
    assert sum(want(wanted(), TOKENS, HASHES)) >= 2 * 96
    dense = np.tile(np.array([5, 1], np.int32), 5000)
    works = want(wanted(separator=(1,), min_tokens=2), dense, [bytes([i % 256, i // 256]) * 16 for i in range(2500)])
    assert max(works) <= 2 * 1024, "however dense the separators"
