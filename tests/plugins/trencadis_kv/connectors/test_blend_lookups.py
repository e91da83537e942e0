"""Prompts are worked through a part at a call: with the results of one call, bounded work, and nothing left of those given up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from trencadis.records import Request
from trencadis_kv.connectors.blend import chunks as blend_chunks
from trencadis_kv.connectors.blend import index as blend_index
from trencadis_kv.connectors.blend import lookups as blend_lookups
from trencadis_kv.connectors.blend.chunks import WantedChunks, cut
from trencadis_kv.connectors.blend.index import ChunkIndex, chunk_key
from trencadis_kv.connectors.blend.lookups import CALL_WORK, BlendLookups
from trencadis_kv.connectors.blend.prompt import PromptTokens, WindowHash

ME = ""


LEAST = 3


LONG = 100_000


def request(prompt, name="r", **more):
    return Request(request_id=name, prompt_token_ids=prompt, **more)


def hashes(prompt, size=4, salt=0):
    return [bytes([salt]) + i.to_bytes(31, "little") for i in range(len(prompt) // size)]


class Lookups(BlendLookups):
    """Over tables of its own."""

    def __init__(self, library=(), *, least=LEAST, longest=8, separator=(), size=4) -> None:
        self.index = ChunkIndex(WindowHash(least, base=12345), max_chunks=100_000)
        for chunk in library:
            ids = np.array(chunk, np.int32)
            self.index.add(ME, chunk_key(ME, ids), ids)
        self.wanted = WantedChunks(block_size=size, chunk_tokens=longest, min_tokens=least, separator=separator)
        super().__init__(self.index, self.wanted, block_size=size, num_first_tokens=1)

    def scan_to_the_end(self, prompt, **more):
        calls = 1
        while (scan := self.scan(request(prompt, **more), hashes(prompt))) is None:
            calls += 1
        return scan, calls

    def noted(self):
        return [(chunk.position, chunk.token_ids.tolist(), chunk.hashes) for chunk in self.wanted._by_number.values()]


def found_at_once(library, prompt, least):
    """The definition: from left to right, the longest agreement with the first tokens of any chunk."""
    places, position = [], 0
    while position < len(prompt):
        agreements = []
        for chunk in library:
            length = 0
            while length < min(len(chunk), len(prompt) - position) and chunk[length] == prompt[position + length]:
                length += 1
            agreements.append(length)
        most = max(agreements, default=0)
        if most >= least:
            places.append((position, most))
        position += most if most >= least else 1
    return places


def wanted_at_once(library, prompt, least, longest, size):
    """The definition, without separators; of chunks that are alike the last one counts."""
    kept = {tuple(chunk) for chunk in library}
    noted = {}
    for first in range(0, len(prompt), longest):
        chunk = tuple(prompt[first : first + longest])
        if len(chunk) >= least and chunk not in kept:
            noted.pop(chunk, None)
            last = -(-(first + len(chunk)) // size)
            noted[chunk] = first, list(chunk), tuple(hashes(prompt, size)[first // size : last])
    return list(noted.values())


tokens = st.integers(0, 2)


@settings(phases=(Phase.explicit, Phase.generate), max_examples=200)
@given(
    library=st.lists(st.lists(tokens, min_size=LEAST, max_size=9), max_size=5),
    parts=st.lists(st.one_of(st.integers(0, 4), st.lists(tokens, max_size=6)), max_size=9),
    piece=st.integers(1, 12),
    budget=st.integers(1, 2000),
)
def test_many_calls_find_and_want_what_one_call_would(library, parts, piece, budget):
    library = [list(chunk) for chunk in dict.fromkeys(map(tuple, library))]
    prompt = [1]
    for part in parts:
        prompt += part if isinstance(part, list) else library[part] if part < len(library) else []
    prompt = prompt[: len(prompt) // 4 * 4] or [1, 1, 1, 1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blend_lookups, "CALL_WORK", budget)
        for module in (blend_chunks, blend_index):
            patch.setattr(module, "PIECE_TOKENS", piece)
        lookups = Lookups(library)
        scan, _ = lookups.scan_to_the_end(prompt)
        learner = Lookups(library)
        learner.register(request(prompt), hashes(prompt))
        for _ in range(1000):
            learner.advance()
    part = scan.found.part()
    places = [] if part is None else [(place.position, place.num_tokens) for place in part.places]
    assert places == found_at_once(library, prompt, LEAST)
    assert lookups.noted() == learner.noted() == wanted_at_once(library, prompt, LEAST, 8, 4)
    assert len(lookups) == len(learner) == 0


@pytest.fixture
def worked(monkeypatch):
    """Tokens that were read, and those that were hashed, each counted where it happens."""
    counts = {"read": 0, "hashed": 0, "compared": 0}

    def counting(owner, name, kind, count):
        whole = getattr(owner, name)

        def counted(*args, **options):
            before = count(*args)
            found = whole(*args, **options)
            counts[kind] += count(*args) - before if kind == "read" else before
            return found

        monkeypatch.setattr(owner, name, counted)

    counting(blend_lookups.PromptTokens, "upto", "read", lambda tokens, _: tokens.num_read)
    counting(blend_chunks, "chunk_key", "hashed", lambda _, ids: len(ids))
    counting(WindowHash, "of", "hashed", lambda _, ids: len(ids))
    counting(blend_index._Table, "longest", "compared", lambda _, first, ids: min(len(ids), 256))
    return counts


def calls_of(step, counts):
    """Do something until it is done; return the tokens of each call."""
    each, is_done = [], False
    while not is_done:
        before = sum(counts.values())
        is_done = step()
        each.append(sum(counts.values()) - before)
    return each


MOST = CALL_WORK + 2 * 1024


"""A call ends with the part that uses its budget up."""


@pytest.mark.parametrize("kept", ["nothing", "everything", "what begins alike"])
def test_call_works_on_few_tokens_of_a_long_prompt(worked, kept):
    prompt = np.random.default_rng(0).integers(0, 50_000, LONG)
    library = [prompt[i : i + 256] for i in range(0, LONG - 255, 256)] if kept == "everything" else []
    if kept == "what begins alike":
        prompt = np.tile(prompt[:64], LONG // 64 + 1)[:LONG]
        library = [np.concatenate([prompt[:64], prompt[:100] + i]) for i in range(1, 20)]
    lookups = Lookups(library, least=64, longest=256)
    asked, known = request(prompt.tolist()), hashes(prompt)
    each = calls_of(lambda: lookups.scan(asked, known) is not None, worked)
    assert max(each) <= MOST
    assert worked["read"] == LONG
    assert len(each) >= (2 * LONG) // MOST
    assert len(lookups) == 0


def test_call_learns_from_few_tokens_of_a_long_prompt_but_from_a_steps_worth(worked):
    prompt = np.random.default_rng(0).integers(0, 50_000, LONG)
    lookups = Lookups(least=64, longest=256, size=16)
    lookups.register(request(prompt.tolist()), hashes(prompt, 16))
    assert 2048 <= worked["read"] <= CALL_WORK, "so many as a step computes are noted before it"
    assert len(lookups.wanted) >= 2048 // 256 - 1
    each = calls_of(lambda: lookups.advance() or not len(lookups), worked)
    assert max(each) <= MOST
    assert len(lookups.wanted) == LONG // 256 + 1


def test_other_prompt_of_the_same_name_begins_anew():
    library = [range(500, 510)]
    lookups = Lookups(library)
    first, second = [*range(1000, 31_000)], [*range(500, 510), 7, 7]
    assert lookups.scan(request(first), hashes(first)) is None
    scan, _ = lookups.scan_to_the_end(second)
    assert [place.position for place in scan.found.part().places] == [0]
    assert lookups.scan(request(first), hashes(first)) is None
    other = lookups.scan(request(first, cache_salt="other"), hashes(first))
    assert other is None
    assert len(lookups) == 1
    assert lookups._asked["r"].tenant == "other"
    assert lookups._asked["r"].tokens.num_read < 30_000


def test_scan_that_was_answered_for_nothing_answers_at_once_when_asked_again():
    prompt = list(range(1, 30_001))
    lookups = Lookups([range(9, 90)])
    scan, calls = lookups.scan_to_the_end(prompt)
    assert calls > 1
    lookups.keep(scan)
    assert lookups.scan(request(prompt), hashes(prompt)) is scan
    assert len(lookups) == 0
    lookups.keep(scan)
    lookups.forget("r")
    assert len(lookups) == 0


TOKENS = np.arange(100, 200, dtype=np.int32)


HASHES = [bytes([i]) * 32 for i in range(25)]


def spans_of(tokens, **options):
    return [span for spans in cut(PromptTokens(tokens, len(tokens)), **options) for span in spans]


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
