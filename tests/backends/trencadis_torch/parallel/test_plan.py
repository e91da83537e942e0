"""Placements by load next to those that vLLM's code computes (two published loads, and a small one with ties)."""

from __future__ import annotations

import json

import attrs
import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.phi3.modeling_phi3 import Phi3Attention, Phi3MLP

from support.backends import tiny_encoders, tiny_models
from support.backends.rank_threads import make_groups
from support.backends.torch_backends import PLAN, make_torch
from trencadis.errors import BackendError, ConfigValueError, ModelLoadError
from trencadis.records import ModelSource
from trencadis_testing.backend import ArgmaxSampler
from trencadis_testing.driver import BackendDriver
from trencadis_torch.config import TorchConfig
from trencadis_torch.parallel.balancing import balance_ratio, balanced_packing, place_experts, replicate_experts
from trencadis_torch.parallel.cuts import even, padded
from trencadis_torch.parallel.fused import gates_side_by_side, heads_side_by_side
from trencadis_torch.parallel.heads import Heads
from trencadis_torch.parallel.placement import ExpertPlacement, ExpertSlots, layer_of, read_loads
from trencadis_torch.parallel.plan import expand_plan, plan_of, read_plan_file
from trencadis_torch.parallel.sharding import shard
from trencadis_torch.parallel.support import FEATURES, ONLY_EMBEDS


def on_meta(kind):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny_models._config(kind), attn_implementation="eager")


def test_a_plan_names_modules_and_parameters_of_every_layer():
    model = on_meta("mixtral")
    found = expand_plan(model, plan_of(model, {}))
    assert found["lm_head"] == "colwise_gather_output"
    assert [found[f"model.layers.{i}.self_attn.k_proj"] for i in range(3)] == ["colwise"] * 3
    assert found["model.layers.2.mlp.experts.gate_up_proj"] == "packed_colwise"
    assert not any("norm" in name for name in found)


def test_a_configured_style_counts_more_and_replicate_takes_one_away():
    model = on_meta("llama")
    found = expand_plan(model, plan_of(model, {"lm_head": "replicate", "model.layers.1.mlp.up_proj": "colwise_rep"}))
    assert "lm_head" not in found
    assert found["model.layers.1.mlp.up_proj"] == "colwise_gather_output"
    assert found["model.layers.0.mlp.up_proj"] == "colwise"


def test_a_model_without_a_plan_is_refused_with_a_way_out():
    with pytest.raises(ModelLoadError, match="GPT2LMHeadModel comes without a plan") as found:
        plan_of(on_meta("gpt2"), {})
    assert "tensor_plan" in found.value.hint


def test_a_style_that_is_not_known_is_refused_by_name():
    model = on_meta("llama")
    model.tp_plan = {**model.tp_plan, "model.layers.*.mlp.up_proj": "sequence_parallel"}
    with pytest.raises(ModelLoadError, match=r'model.layers.0.mlp.up_proj as "sequence_parallel"'):
        expand_plan(model, plan_of(model, {}))


def test_a_configured_name_that_is_not_in_the_model_is_refused():
    (groups, _) = make_groups(2)
    with pytest.raises(ConfigValueError, match=r"no module or parameter model.layers.\*.q_proj"):
        shard(on_meta("llama"), groups.tensor, {"model.layers.*.q_proj": "colwise"})


@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_a_plan_is_read_from_a_file(tmp_path, suffix):
    plan, path = (
        {"h.*.attn.c_attn": "packed_colwise_3", "lm_head": "colwise_gather_output"},
        tmp_path / f"plan.{suffix}",
    )
    text = json.dumps(plan) if suffix == "json" else "".join(f'"{name}" = "{style}"\n' for name, style in plan.items())
    path.write_text(text)
    assert read_plan_file(str(path)) == plan


def test_without_a_file_there_is_no_plan():
    assert read_plan_file("") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [("[", "cannot be read"), ("[a]\nb = 'colwise'", "no table"), ("a = 'columns'", 'a = "columns": no such style')],
)
def test_a_file_that_is_no_plan_is_refused(tmp_path, text, message):
    path = tmp_path / "plan.toml"
    path.write_text(text)
    with pytest.raises(ConfigValueError, match=message):
        read_plan_file(str(path))


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigValueError, match="cannot be read"):
        read_plan_file(str(tmp_path / "none.toml"))


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


def test_sizes_that_leave_a_rest_are_refused_with_the_legal_ones():
    with pytest.raises(ModelLoadError, match=r"tensor = 5: mlp.gate has 12 .* not a multiple of 5") as found:
        even(12, dim=0, rank=0, size=5, what="mlp.gate")
    assert "1, 2, 3, 4, 6, 12" in found.value.hint


@pytest.mark.parametrize(("num", "size"), [(131, 2), (131, 4), (5, 4), (3, 4), (8, 4)])
def test_vocabularies_are_divided_without_a_gap_and_padded_at_the_end(num, size):
    cuts = [padded(num, dim=0, rank=rank, size=size) for rank in range(size)]
    assert [token for cut in cuts for one in cut.ranges for token in range(*one)] == list(range(num))
    assert len({cut.size for cut in cuts}) == 1
    assert all(last - first <= cut.size for cut in cuts for first, last in cut.ranges)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "size"), [(8, 8, 4), (8, 4, 2), (8, 2, 4), (8, 2, 8), (4, 1, 4), (6, 2, 2)]
)
def test_every_query_head_finds_its_kv_head_on_its_rank(num_heads, num_kv_heads, size):
    groups = num_heads // num_kv_heads
    seen = []
    for rank in range(size):
        heads = Heads.of(num_heads, num_kv_heads, rank=rank, size=size, what="m")
        local_groups = heads.num_query // heads.num_kv
        for own in range(heads.num_query):
            assert heads.first_kv + own // local_groups == (heads.first_query + own) // groups
            seen.append(heads.first_query + own)
    assert seen == list(range(num_heads))


def test_ranks_beyond_the_kv_heads_have_them_several_times():
    found = [Heads.of(8, 2, rank=rank, size=4, what="m") for rank in range(4)]
    assert [(one.first_kv, one.num_kv) for one in found] == [(0, 1), (0, 1), (1, 1), (1, 1)]


@pytest.mark.parametrize(("size", "legal"), [(3, "1, 2, 4, 12"), (24, "1, 2, 4, 12")])
def test_other_numbers_of_ranks_are_refused_with_the_legal_ones(size, legal):
    with pytest.raises(ModelLoadError, match="12 query heads and 4 KV heads") as found:
        Heads.of(12, 4, rank=0, size=size, what="m")
    assert found.value.hint.endswith(f"one of: {legal}.")


def attention(kind=Phi3Attention):
    with torch.device("meta"):
        return kind(tiny_models._config("phi3"), 0)


def test_an_attention_with_queries_keys_values_in_this_order_is_known_by_a_trial():
    assert heads_side_by_side(attention(), num_heads=4, num_kv_heads=2, fused="qkv_proj", out="o_proj")


class _After(nn.Module):
    """Another module, and a change to its input or output."""

    def __init__(self, inner, *, before=None, after=None):
        super().__init__()
        self._inner = (inner,)
        self._before = before or (lambda x: x)
        self._after = after or (lambda x: x)

    def forward(self, x):
        return self._after(self._inner[0](self._before(x)))


class KeysFirst(Phi3Attention):
    def forward(self, *args, **options):
        self._modules["qkv_proj"] = _After(self.qkv_proj, after=lambda x: x.roll(24, -1))
        return super().forward(*args, **options)


class Backwards(Phi3Attention):
    def forward(self, *args, **options):
        self._modules["o_proj"] = _After(self.o_proj, before=lambda x: x.flip(-1))
        return super().forward(*args, **options)


class TakesMore(Phi3Attention):
    def forward(self, hidden_states, position_embeddings, attention_mask, offsets, **options):
        return super().forward(hidden_states, position_embeddings, attention_mask, **options)


@pytest.mark.parametrize("kind", [KeysFirst, Backwards, TakesMore])
def test_any_other_attention_is_not(kind):
    assert not heads_side_by_side(attention(kind), num_heads=4, num_kv_heads=2, fused="qkv_proj", out="o_proj")
    assert not heads_side_by_side(attention(), num_heads=2, num_kv_heads=4, fused="qkv_proj", out="o_proj")


def mlp(kind=Phi3MLP):
    with torch.device("meta"):
        return kind(tiny_models._config("phi3"))


class Interleaved(Phi3MLP):
    def forward(self, hidden_states):
        whole = self.gate_up_proj(hidden_states)
        return self.down_proj(whole[..., 1::2] * self.activation_fn(whole[..., ::2]))


class Normed(Phi3MLP):
    def forward(self, hidden_states):
        gate, up = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
        inner = up * self.activation_fn(gate)
        return self.down_proj(inner / inner.norm(dim=-1, keepdim=True))


def test_gates_beside_what_they_gate_are_known_by_a_trial():
    assert gates_side_by_side(mlp(), fused="gate_up_proj", out="down_proj")


@pytest.mark.parametrize("kind", [Interleaved, Normed])
def test_any_other_mlp_is_not(kind):
    assert not gates_side_by_side(mlp(kind), fused="gate_up_proj", out="down_proj")


ASKING = {
    "compile": "buckets",
    "graphs": "checked",
    "layout": "padded",
    "attention": "sdpa",
    "quantization": "int8",
    "kv_dtype": "int8",
}
"""A value of each setting that asks for the feature."""


def test_a_model_that_only_embeds_is_refused_as_the_table_says(tmp_path, ranks):
    path = tiny_encoders.save_encoder("bert", tmp_path)

    def load(groups):
        backend = make_torch()
        backend.join(groups)
        backend.load(ModelSource(path=str(path)), sampler=ArgmaxSampler())

    for error in ranks(lambda groups: groups, 2).errors(load):
        assert isinstance(error, BackendError)
        assert str(error).startswith(f"[parallel] 2 ranks: {path}: {ONLY_EMBEDS.refused['tensor']}.")


def test_every_row_is_of_a_setting_and_asked_for_by_other_values_than_the_default():
    fields = attrs.fields_dict(TorchConfig)
    for feature in FEATURES:
        if feature.setting:
            table, _, key = feature.setting.rpartition(".")
            assert table == "backend.torch"
            assert not feature.is_asked(fields[key].default)
            assert feature.is_asked(ASKING[key])


@pytest.mark.parametrize("feature", [one for one in FEATURES if one.setting], ids=lambda one: one.setting)
def test_joining_others_is_refused_where_the_table_says_so_and_nowhere_else(feature):
    key = feature.setting.rpartition(".")[2]
    options = {"layout": "padded"} if "tensor" in feature.refused else {}
    backend = make_torch(**{**options, key: ASKING[key]})
    if "tensor" in feature.refused:
        with pytest.raises(
            ConfigValueError, match=rf'^\[backend\.torch\] {key} = "{ASKING[key]}" with \[parallel\] tensor = 2: '
        ) as caught:
            backend.join(make_groups(2)[0])
        assert feature.refused["tensor"] in str(caught.value)
        assert caught.value.hint == feature.remedy
    else:
        backend.join(make_groups(2)[0])
    backend.close()


def test_a_gguf_file_is_divided(tmp_path, model_path, ranked):
    pytest.importorskip("gguf")
    backend = ranked(make_torch, 2)
    backend.load(ModelSource(path=str(tiny_models.save_gguf(tmp_path))), sampler=ArgmaxSampler())
    backend.allocate(PLAN)
    prompt = tiny_models.prompt(19)
    assert BackendDriver(backend, PLAN).generate({0: prompt}, 6)[0] == tiny_models.greedy_reference(
        model_path("llama"), prompt, 6
    )
