"""Prompts are read no further than asked for, and parts of what was found are those that adding up gives."""

from __future__ import annotations

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from trencadis_kv.connectors.blend.messages import ChunkPlace
from trencadis_kv.connectors.blend.prompt import FoundChunks, PromptTokens


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
