"""Placements by load next to those that vLLM's code computes (two published loads, and a small one with ties)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trencadis.errors import ConfigValueError, ModelLoadError
from trencadis_torch.parallel.balancing import balance_ratio, balanced_packing, place_experts, replicate_experts
from trencadis_torch.parallel.placement import ExpertPlacement, ExpertSlots, layer_of, read_loads

NAME = "model.layers.3.mlp.experts"


def test_without_loads_experts_that_follow_each_other_are_on_one_rank():
    slots = ExpertPlacement(num_ranks=2).of(NAME, 6)
    assert slots.ranks == ((0, 1, 2), (3, 4, 5))
    assert ExpertPlacement(num_ranks=2).digest == 0


def test_a_layers_own_loads_place_its_experts():
    placement = ExpertPlacement(num_ranks=2, loads={3: (9.0, 8.0, 1.0, 2.0), 4: (9.0, 1.0, 8.0, 2.0)})
    assert placement.of(NAME, 4).ranks == ((0, 2), (1, 3))
    assert placement.of("model.layers.4.mlp.experts", 4).ranks == ((0, 1), (2, 3))


def test_busy_experts_have_copies():
    slots = ExpertPlacement(num_ranks=2, loads={3: (10.0, 1.0, 1.0, 1.0)}, num_redundant=2).of(NAME, 4)
    assert slots.ranks == ((0, 0, 3), (0, 1, 2))
    assert slots.copies() == [[(0, 0), (0, 1), (1, 0)], [(1, 1)], [(1, 2)], [(0, 2)]]


@pytest.mark.parametrize("experts", [(0,), (2, 3), (5, 0, 1, 2), (4, 4, 5), (1, 3, 5)])
def test_a_rank_takes_its_experts_in_order(experts):
    whole = torch.arange(6 * 2).view(6, 2)
    cut = ExpertSlots(num_experts=6, ranks=((), experts)).cut(1)
    assert torch.equal(cut.take(whole), whole[list(experts)])
    assert cut.shape(whole.shape) == (len(experts), 2)


def test_numbers_that_do_not_go_are_refused_with_those_that_do():
    with pytest.raises(ModelLoadError, match=r"expert = 4: model.layers.3.mlp.experts has 6 experts") as found:
        ExpertPlacement(num_ranks=4).of(NAME, 6)
    assert "1, 2, 3, 6" in found.value.hint
    with pytest.raises(ModelLoadError, match=r"redundant_experts = 3: .* 9 with these") as found:
        ExpertPlacement(num_ranks=4, loads={3: (1.0,) * 6}, num_redundant=3).of(NAME, 6)
    assert "2, 6, 10" in found.value.hint


def test_copies_may_make_a_number_go():
    slots = ExpertPlacement(num_ranks=4, loads={3: (1.0,) * 6}, num_redundant=2).of(NAME, 6)
    assert [len(one) for one in slots.ranks] == [2] * 4


@pytest.mark.parametrize(("loads", "said"), [({2: (1.0,) * 4}, "nothing of layer 3"), ({3: (1.0,) * 8}, "8 loads")])
def test_loads_of_another_model_are_refused(loads, said):
    with pytest.raises(ConfigValueError, match=rf"loads\.json: it has {said}.* has 4 experts"):
        ExpertPlacement(num_ranks=2, loads=loads, source="loads.json").of(NAME, 4)


def test_other_loads_and_copies_have_another_digest():
    placements = [
        ExpertPlacement(num_ranks=2, loads={0: (1.0, 2.0)}),
        ExpertPlacement(num_ranks=2, loads={0: (2.0, 1.0)}),
        ExpertPlacement(num_ranks=2, loads={1: (1.0, 2.0)}),
        ExpertPlacement(num_ranks=2, loads={0: (1.0, 2.0)}, num_redundant=2),
    ]
    assert len({one.digest for one in placements}) == 4
    assert ExpertPlacement(num_ranks=2, loads={0: (1.0, 2.0)}).digest == placements[0].digest


@pytest.mark.parametrize(
    ("name", "layer"), [(NAME, 3), ("transformer.h.12.moe.experts", 12), ("experts", 0), ("model.experts", 0)]
)
def test_layers_are_told_by_name(name, layer):
    assert layer_of(name) == layer


def test_a_file_of_loads_is_read(tmp_path):
    path = tmp_path / "loads.json"
    path.write_text('{"0": [1, 2.5], "11": [0, 3]}')
    loads, source = read_loads(str(path))
    assert loads == {0: (1.0, 2.5), 11: (0.0, 3.0)}
    assert str(path) in source


@pytest.mark.parametrize(
    "text",
    ["", "[1]", "{}", '{"first": [1]}', '{"0": []}', '{"0": [1, -1]}', '{"0": [true]}', '{"0": ["1"]}', '{"0": [NaN]}', '{"0": 3}'],
)  # fmt: skip
def test_a_file_that_is_none_is_refused(tmp_path, text):
    path = tmp_path / "loads.json"
    path.write_text(text)
    with pytest.raises(ConfigValueError, match=r"loads\.json") as found:
        read_loads(str(path))
    assert "trencadis expert-loads" in found.value.hint


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigValueError, match="cannot be read"):
        read_loads(str(tmp_path / "nothing.json"))


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
