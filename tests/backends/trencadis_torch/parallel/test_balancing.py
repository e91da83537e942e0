"""Placements by load next to those that vLLM's code computes (two published loads, and a small one with ties)."""

from __future__ import annotations

import numpy as np
import pytest

from trencadis_torch.parallel.balancing import balance_ratio, balanced_packing, place_experts, replicate_experts

LOADS = np.array(
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ]
)
HIERARCHICAL = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]
GLOBAL = [
    [10, 6, 10, 7, 0, 2, 11, 4, 5, 9, 5, 4, 8, 3, 1, 1],
    [1, 10, 2, 4, 5, 11, 5, 0, 6, 7, 6, 3, 9, 8, 8, 7],
]


def each_load(loads, placed):
    counts = np.stack([np.bincount(row, minlength=loads.shape[1]) for row in placed])
    return np.take_along_axis(loads / counts, placed, 1)


def test_experts_are_placed_within_nodes_as_vllm_places_them():
    placed = place_experts(LOADS, num_physical=16, num_groups=4, num_nodes=2, num_ranks=8)
    assert placed.tolist() == HIERARCHICAL
    np.testing.assert_allclose(balance_ratio(LOADS, placed, num_ranks=8), [0.8277, 0.8050], atol=5e-5)


def test_experts_are_placed_over_all_ranks_as_vllm_places_them():
    placed = place_experts(LOADS[:1], num_physical=16, num_ranks=8)
    assert placed.tolist() == GLOBAL[:1]
    np.testing.assert_allclose(balance_ratio(LOADS[:1], placed, num_ranks=8), [0.9323], atol=5e-5)


@pytest.mark.parametrize(
    ("loads", "expected", "num_ranks", "ratio"),
    [(LOADS[1:], GLOBAL[1:], 8, 0.8401), (np.array([[10, 1, 1, 1]]), [[0, 0, 2, 0, 1, 3]], 2, 0.8478)],
)
def test_experts_of_equal_load_may_change_places(loads, expected, num_ranks, ratio):
    """NumPy's default sort, which vLLM's code calls, orders equal loads as the CPU's vector instructions have it."""
    placed = place_experts(loads, num_physical=len(expected[0]), num_ranks=num_ranks)
    np.testing.assert_array_equal(each_load(loads, placed), each_load(loads, np.array(expected)))
    assert np.sort(placed).tolist() == np.sort(expected).tolist()
    np.testing.assert_allclose(balance_ratio(loads, placed, num_ranks=num_ranks), [ratio], atol=5e-5)


def test_of_equal_loads_the_first_goes_first_on_every_machine():
    assert place_experts([[10, 1, 1, 1]], num_physical=6, num_ranks=2).tolist() == [[0, 0, 3, 0, 1, 2]]
    many = place_experts(np.ones((1, 64)), num_physical=64, num_ranks=4)
    assert many.reshape(4, 16).tolist() == [list(range(rank, 64, 4)) for rank in range(4)]


def test_the_heaviest_item_goes_into_the_lightest_pack_that_has_room():
    packs, places = balanced_packing([[1, 9, 8, 7, 2, 6]], 2)
    assert packs.tolist() == [[1, 0, 1, 1, 0, 0]]
    assert places.tolist() == [[2, 0, 0, 1, 2, 1]]
    assert balanced_packing([[3, 1, 2]], 3)[0].tolist() == [[0, 1, 2]]


def test_copies_go_to_the_expert_whose_copies_have_most_to_do():
    physical, counts = replicate_experts([[10, 4, 6], [1, 1, 9]], 6)
    assert counts.tolist() == [[3, 1, 2], [1, 1, 4]]
    assert physical.tolist() == [[0, 1, 2, 0, 2, 0], [0, 1, 2, 2, 2, 2]]


@pytest.mark.parametrize("seed", range(20))
def test_every_expert_is_somewhere_and_no_placement_is_worse_than_the_linear_one_on_average(seed):
    generator = np.random.default_rng(seed)
    loads = generator.exponential(size=(6, 16)) ** 2
    placed = place_experts(loads, num_physical=24, num_groups=8, num_nodes=2, num_ranks=4)
    assert all(set(row) == set(range(16)) for row in placed.tolist())
    for row, own in enumerate(placed.reshape(6, 2, 12).tolist()):
        groups = [{expert // 2 for expert in node} for node in own]
        assert [len(one) for one in groups] == [4, 4], f"groups of row {row} are on several nodes"
    alike = place_experts(loads, num_physical=16, num_ranks=4)
    linear = np.tile(np.arange(16), (6, 1))
    assert balance_ratio(loads, alike, num_ranks=4).mean() > balance_ratio(loads, linear, num_ranks=4).mean()
    with_copies = place_experts(loads, num_physical=24, num_ranks=4)
    assert balance_ratio(loads, with_copies, num_ranks=4).min() > 0.8


def test_no_load_at_all_is_even():
    placed = place_experts(np.zeros((1, 4)), num_physical=6, num_ranks=2)
    assert set(placed[0].tolist()) == {0, 1, 2, 3}
    assert balance_ratio(np.zeros((1, 4)), placed, num_ranks=2).tolist() == [1.0]


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"num_physical": 13, "num_ranks": 2}, "13 places"),
        ({"num_physical": 12, "num_ranks": 2, "num_groups": 5}, "12 experts"),
        ({"num_physical": 12, "num_ranks": 4, "num_groups": 3, "num_nodes": 2}, "3 groups"),
        ({"num_physical": 12, "num_ranks": 3, "num_groups": 4, "num_nodes": 2}, "3 ranks"),
        ({"num_physical": 10, "num_ranks": 2}, "10 places"),
    ],
)
def test_numbers_that_do_not_go_are_named(sizes, named):
    with pytest.raises(ValueError, match=named):
        place_experts(LOADS, **sizes)
    with pytest.raises(ValueError, match="3 items"):
        balanced_packing([[1, 2, 3]], 2)
