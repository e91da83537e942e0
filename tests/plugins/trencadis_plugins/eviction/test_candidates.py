from __future__ import annotations

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from trencadis_plugins.eviction.candidates import Candidates

MOVES = st.lists(
    st.tuples(st.sampled_from(["add", "add", "discard", "take"]), st.integers(0, 30), st.integers(0, 4)), max_size=300
)


@settings(max_examples=60, phases=[Phase.explicit, Phase.generate])
@given(moves=MOVES)
def test_the_lowest_rank_is_taken_and_of_equals_the_first(moves: list[tuple[str, int, int]]) -> None:
    candidates = Candidates()
    model: dict[int, tuple[int, int]] = {}
    for number, (kind, block, rank) in enumerate(moves):
        if kind == "add":
            candidates.add(block, rank)
            model[block] = (rank, number)
        elif kind == "discard":
            candidates.discard(block)
            model.pop(block, None)
        elif model:
            wanted = min(model, key=model.__getitem__)
            assert candidates.lowest_rank() == model[wanted][0]
            assert candidates.take() == wanted
            del model[wanted]
        assert len(candidates) == len(model)
        assert (block in candidates) == (block in model)


def test_nothing_to_take_is_an_index_error() -> None:
    candidates = Candidates()
    candidates.add(1)
    candidates.discard(1)
    with pytest.raises(IndexError):
        candidates.take()


def test_entries_that_were_dropped_or_whose_rank_changed_do_not_pile_up() -> None:
    candidates = Candidates()
    for number in range(10_000):
        candidates.add(7, number)
        candidates.add(number % 5, number)
        candidates.discard(number % 5)
    assert len(candidates._heap) < 200
