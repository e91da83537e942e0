from __future__ import annotations

import pytest

from trencadis_plugins.speculation.suffix_outputs import PastOutputs


def past(max_requests=10, max_tokens=100):
    return PastOutputs(max_depth=6, max_requests=max_requests, max_tokens=max_tokens)


def test_outputs_are_kept_apart_by_key():
    outputs = past()
    outputs.add("blue", [1, 2, 3])
    outputs.add("green", [1, 2, 4])
    assert outputs.tree("blue").locate([3]) is not None
    assert outputs.tree("blue").locate([4]) is None
    assert outputs.tree("red") is None


def test_oldest_request_of_all_goes_first_and_an_empty_key_with_it():
    outputs = past(max_requests=2)
    for key, token in (("blue", 1), ("green", 2), ("green", 3)):
        outputs.add(key, [token] * 4)
    assert outputs.tree("blue") is None
    assert outputs.tree("green").locate([2, 2]) is not None
    assert (len(outputs), outputs.num_tokens) == (2, 8)


def test_tokens_are_bounded_too_and_a_long_output_keeps_its_end():
    outputs = past(max_tokens=10)
    outputs.add("a", list(range(8)))
    outputs.add("a", list(range(20, 25)))
    assert outputs.num_tokens == 5
    outputs.add("b", list(range(100)))
    assert outputs.num_tokens == 10
    assert outputs.tree("a") is None
    assert outputs.tree("b").locate([89]) is None
    assert outputs.tree("b").locate([90]) is not None


@pytest.mark.parametrize("limits", [{"max_requests": 0}, {"max_tokens": 0}])
def test_nothing_is_kept_where_a_limit_is_zero(limits):
    outputs = past(**limits)
    outputs.add("a", [1, 2, 3])
    assert (len(outputs), outputs.num_tokens, outputs.tree("a")) == (0, 0, None)


def test_empty_outputs_count_for_nothing_and_clear_forgets_all():
    outputs = past()
    outputs.add("a", [])
    assert len(outputs) == 0
    outputs.add("a", [1])
    outputs.clear()
    assert (len(outputs), outputs.num_tokens, outputs.tree("a")) == (0, 0, None)
