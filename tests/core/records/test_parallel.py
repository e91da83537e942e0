from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trencadis.records import divide_layers

SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=7)


def largest(sizes, stages, first, last):
    besides = {0: first}
    besides[len(stages) - 1] = besides.get(len(stages) - 1, 0) + last
    return max(sum(sizes[i] for i in one) + besides.get(k, 0) for k, one in enumerate(stages))


@given(SIZES, st.integers(1, 4), st.integers(0, 60), st.integers(0, 60))
def test_no_other_division_has_a_smaller_largest_stage(sizes, num_stages, first, last):
    if num_stages > len(sizes):
        with pytest.raises(ValueError, match="layers for"):
            divide_layers(sizes, num_stages=num_stages, first=first, last=last)
        return
    found = divide_layers(sizes, num_stages=num_stages, first=first, last=last)
    assert [i for one in found for i in one] == list(range(len(sizes)))
    assert all(found)
    cuts = itertools.combinations(range(1, len(sizes)), num_stages - 1)
    others = [[range(a, b) for a, b in itertools.pairwise((0, *cut, len(sizes)))] for cut in cuts]
    assert largest(sizes, found, first, last) == min(largest(sizes, one, first, last) for one in others)


def test_a_large_vocabulary_leaves_fewer_layers_to_its_stage():
    assert divide_layers([10] * 8, num_stages=2, last=40) == [range(6), range(6, 8)]
