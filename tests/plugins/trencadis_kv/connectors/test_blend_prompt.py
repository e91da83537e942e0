"""Prompts are read no further than asked for, and parts of what was found are those that adding up gives."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from trencadis.errors import TransferError
from trencadis.records import Request, TransferCause
from trencadis_kv.connectors.blend.index import ChunkIndex, chunk_key, tenant_of
from trencadis_kv.connectors.blend.messages import (
    AssembleOrder,
    BlendOrders,
    ChunkPlace,
    SaveChunkOrder,
    decode_orders,
    encode_orders,
)
from trencadis_kv.connectors.blend.prompt import FoundChunks, PromptTokens, WindowHash, blend_ratio_of, wants_blend


@pytest.mark.parametrize(
    ("params", "asks"),
    [(None, False), ({}, False), ({"blend": True}, True), ({"blend": 1}, False), ({"blend": "true"}, False)],
)
def test_only_true_asks(params, asks):
    assert wants_blend(params) is asks


@pytest.mark.parametrize(
    ("given", "ratio"),
    [(0, 0.0), (1, 1.0), (0.3, 0.3), (True, None), ("0.3", None), (-0.1, None), (1.1, None), (None, None)],
)
def test_ratio_is_a_share_or_nothing(given, ratio):
    assert blend_ratio_of({"blend_ratio": given}, 0.15) == ratio


def test_ratio_is_the_configured_one_if_the_request_names_none():
    assert blend_ratio_of({"blend": True}, 0.15) == 0.15
    assert blend_ratio_of(None, 0.25) == 0.25


PRIME = 2**31 - 1


def by_definition(tokens, window, base):
    return [
        sum(tokens[i + k] * pow(base, k, PRIME) for k in range(window)) % PRIME for i in range(len(tokens) - window + 1)
    ]


@pytest.mark.parametrize("length", [0, 1, 4, 5, 6, 200])
@pytest.mark.parametrize("base", [2, 12345, PRIME - 2])
def test_hashes_are_those_of_the_definition(length, base):
    tokens = np.random.default_rng(length).integers(0, 2**31 - 1, length).astype(np.int32)
    found = WindowHash(5, base=base).of(tokens)
    assert found.tolist() == by_definition(tokens.tolist(), 5, base)


def test_base_is_drawn_anew_each_time():
    """Two processes, or two connectors, do not share it: a collision found in one is none in the other."""
    tokens = np.arange(1, 9, dtype=np.int32)
    assert len({int(WindowHash(8).of(tokens)[0]) for _ in range(8)}) == 8


class Counted(tuple):
    """Tokens that note how many of them were read at once."""

    reads: list[int]

    def __getitem__(self, part):
        found = super().__getitem__(part)
        self.reads.append(len(found))
        return found


def test_prompt_is_read_once_and_no_further_than_asked_for():
    given_ids = Counted(range(100, 150))
    given_ids.reads = []
    tokens = PromptTokens(given_ids, 40)
    assert tokens.upto(10)[:10].tolist() == list(range(100, 110))
    tokens.upto(10)
    tokens.upto(5)
    assert tokens.upto(40).tolist() == list(range(100, 140))
    assert given_ids.reads == [10, 30]
    assert (len(tokens), tokens.num_read) == (40, 40)


def added_up(places, first, block_size, num_first):
    """The definition, by looking at every one."""
    behind = [place for place in places if place[0] + place[1] > first]
    if not behind:
        return None
    end = (behind[-1][0] + behind[-1][1]) // block_size * block_size
    spans = [(max(start, first), min(start + length, end), start, chunk) for start, length, chunk in behind]
    spans = [span for span in spans if span[1] > span[0]]
    if not spans:
        return None
    lengths = [last - first for first, last, *_ in spans]
    whole = [(first, last - first, first - start) for first, last, start, _ in spans]
    late = sum(max(0, length - num_first) for length in lengths)
    return end, whole, sum(lengths), late, sum(span[3] for span in spans)


@settings(phases=(Phase.explicit, Phase.generate), max_examples=300)
@given(
    steps=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 9), st.integers(0, 3)), max_size=6),
    first=st.integers(0, 60),
    block_size=st.integers(1, 8),
    num_first=st.integers(0, 4),
)
def test_part_is_what_looking_at_every_chunk_gives(steps, first, block_size, num_first):
    places, position = [], 0
    found = FoundChunks(num_first_tokens=num_first)
    for gap, length, more in steps:
        places.append((position + gap, length, length + more))
        found.add(ChunkPlace(b"k", length + more, 0, position + gap, length))
        position += gap + length
    part, expected = found.part(first, block_size=block_size), added_up(places, first, block_size, num_first)
    assert len(found) == len(steps)
    if part is None or expected is None:
        assert part is expected
        return
    whole = [(place.position, place.num_tokens, place.skip) for place in part.places]
    assert (part.end, whole, part.num_tokens, part.num_late_tokens, part.num_read_tokens) == expected


def test_orders_arrive_as_they_were_sent():
    orders = BlendOrders(
        saves=[SaveChunkOrder(3, b"k" * 32, 20, 7, 6, [0, 2], [9, 4])],
        assemblies=[AssembleOrder(5, b"\x01\x00\x00\x00", 4, [1, 2], [ChunkPlace(b"c" * 32, 64, 3, 4, 20)], 0.25)],
        cancels=[8],
    )
    assert decode_orders(encode_orders(orders)) == orders


def test_nothing_to_do_is_an_empty_message():
    assert encode_orders(BlendOrders()) == b""
    assert decode_orders(b"") == BlendOrders()


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (b"\xff", TransferCause.CORRUPT),
        (msgspec.msgpack.encode([1, [["x"]]]), TransferCause.CORRUPT),
        (msgspec.msgpack.encode([2]), TransferCause.INCOMPATIBLE),
    ],
)
def test_what_is_no_message_is_refused(message, cause):
    with pytest.raises(TransferError) as caught:
        decode_orders(message)
    assert caught.value.cause == cause


ME, YOU = "me", "you"


def tokens(seed, count=32):
    return np.random.default_rng(seed).integers(0, 5000, count).astype(np.int32)


def index_of(*chunks, tenant=ME, windows=None, max_chunks=100):
    index = ChunkIndex(windows or WindowHash(8), max_chunks=max_chunks)
    for chunk in chunks:
        index.add(tenant, chunk_key(tenant, chunk), chunk)
    return index


def find(index, tenant, prompt, first=0):
    found = FoundChunks()
    for _ in index.search(tenant, prompt, found):
        pass
    part = found.part(first)
    return [] if part is None else list(part.places)


def places(matches):
    return [(match.position, match.skip, match.num_tokens) for match in matches]


def test_crafted_collision_is_refused_because_tokens_are_compared():
    """Whoever knew the base could do this: two runs with one hash."""
    windows = WindowHash(8, base=3)
    honest = tokens(1, 8)
    forged = honest.copy()
    forged[0] += 3  # 3 less of base^1 makes up for it
    forged[1] -= 1
    assert windows.of(forged)[0] == windows.of(honest)[0]
    assert find(index_of(honest, windows=windows), ME, forged) == []
    both = index_of(honest, forged, windows=windows)
    assert [match.key for match in find(both, ME, forged)] == [chunk_key(ME, forged)]


def test_tenants_know_nothing_of_each_other():
    a = tokens(1)
    index = index_of(a, tenant=YOU)
    assert find(index, ME, a) == []
    assert chunk_key(ME, a) != chunk_key(YOU, a)
    assert tenant_of(Request(request_id="r", prompt_token_ids=(1,), cache_salt="s")) == "s"


def test_oldest_is_forgotten_when_there_are_too_many_but_not_what_was_found_lately():
    chunks = [tokens(seed) for seed in range(4)]
    index = index_of(*chunks[:3], max_chunks=3)
    find(index, ME, chunks[0])
    index.add(ME, chunk_key(ME, chunks[3]), chunks[3])
    assert [bool(find(index, ME, chunk)) for chunk in chunks] == [True, False, True, True]
    assert len(index) == 3


def test_forgotten_chunk_is_not_found_and_can_come_back():
    a, b = tokens(1), np.concatenate([tokens(1, 32)[:8], tokens(7, 8)])
    index = index_of(a, b)
    for _ in range(2):
        index.forget(ME, chunk_key(ME, a))
    assert places(find(index, ME, a)) == [(0, 0, 8)], "what begins alike stays"
    assert not index.has(ME, chunk_key(ME, a))
    index.add(ME, chunk_key(ME, a), a)
    assert places(find(index, ME, a)) == [(0, 0, 32)]
    for chunk in (a, b):
        index.forget(ME, chunk_key(ME, chunk))
    assert find(index, ME, a) == []
    assert not index._tables
