from __future__ import annotations

import pytest
import torch

from trencadis.errors import ConfigValueError, ModelLoadError
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
