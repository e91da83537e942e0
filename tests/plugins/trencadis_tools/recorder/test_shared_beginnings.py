from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trencadis_tools.recorder.shared_beginnings import shared_beginnings

TEXTS = st.lists(st.lists(st.sampled_from((0, 1, 255, 256, 70000)), max_size=6), max_size=9)


def num_alike(one, other):
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def stand_ins(texts, found):
    """Texts with the same beginnings, made of nothing but the answer."""
    made = {}

    def make(number):
        if number not in made:
            like, count = found[number]
            made[number] = (make(like)[:count] if count else []) + [1000 + number] * (len(texts[number]) - count)
        return made[number]

    return [make(number) for number in range(len(texts))]


@given(TEXTS)
def test_any_two_texts_begin_alike_for_as_long_as_what_is_made_of_the_answer(texts):
    made = stand_ins(texts, shared_beginnings([np.array(text, np.int32) for text in texts]))
    assert [len(text) for text in made] == [len(text) for text in texts]
    for i, text in enumerate(texts):
        for j, other in enumerate(texts):
            assert num_alike(made[i], made[j]) == num_alike(text, other)


def test_nothing_in_common_has_no_other_text():
    assert shared_beginnings([np.array([1, 2], np.int32), np.array([2, 1], np.int32)]) == [(-1, 0), (-1, 0)]
