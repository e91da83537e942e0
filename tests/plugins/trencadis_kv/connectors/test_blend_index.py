"""Chunks are found wherever they stand, as far as their tokens agree, and by nobody else."""

from __future__ import annotations

import numpy as np

from trencadis.records import Request
from trencadis_kv.connectors.blend.index import ChunkIndex, chunk_key, tenant_of
from trencadis_kv.connectors.blend.prompt import FoundChunks, WindowHash

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
