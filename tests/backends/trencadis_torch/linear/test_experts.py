"""Experts that are packed, the choice among them, and mixtures in the structure of published checkpoints."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from support.backends import families, quantised_checkpoints, tiny_models
from support.backends.held_forms import FORMS
from support.backends.one_call import errors_in_one_call
from support.backends.served import held, prompt_logprobs
from trencadis_torch.linear.decoder import decoder_of
from trencadis_torch.linear.experts import (
    LIMITED,
    Activated,
    FusedMixture,
    Grouping,
    LooseExperts,
    Routing,
    Score,
)
from trencadis_torch.linear.held import JoinedWeight, StackedWeight
from trencadis_torch.linear.mixtures import packed_experts
from trencadis_torch.linear.native import ACTIVATIONS, Mixture, native
from trencadis_torch.linear.readers import _activation_of as activation_of
from trencadis_torch.linear.readers import agree

pytestmark = pytest.mark.skipif(native() is None, reason="there is no C++ compiler on this machine")

EXPERTS, CHOSEN, HIDDEN, INNER = 5, 3, 48, 40
SILU = Activated(activation=ACTIVATIONS["silu"])


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def loose(form="float32", activated=SILU, *, has_bias=False, transposed=False, interleaved=False):
    """Return experts of which no size is a multiple of a panel."""
    matrices = [FORMS[form](random(2 * INNER, HIDDEN, seed=e) / 6) for e in range(EXPERTS)]
    back = [FORMS[form](random(HIDDEN, INNER, seed=50 + e) / 6) for e in range(EXPERTS)]
    halves = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, INNER), slice(INNER, None))
    return LooseExperts(
        up=StackedWeight(matrices, flipped=transposed),
        down=StackedWeight(back, flipped=transposed),
        up_bias=random(EXPERTS, 2 * INNER, seed=90) if has_bias else None,
        down_bias=random(EXPERTS, HIDDEN, seed=91) if has_bias else None,
        transposed=transposed,
        gates=halves[0],
        values=halves[1],
        activated=activated,
        native=native(),
    )


def routes(num_rows, seed=7):
    """Return experts of rows, the last of which none chooses, and their weights."""
    scores = torch.rand(num_rows, EXPERTS - 1, generator=torch.Generator().manual_seed(seed))
    weights, experts = scores.topk(CHOSEN)
    return experts, weights


@pytest.mark.representatives(9)
@pytest.mark.parametrize("num_rows", [1, 7, 600])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "has_bias": True,
            "transposed": True,
            "interleaved": True,
            "activated": Activated(activation=LIMITED, alpha=1.7, limit=2.0),
        },
        {"form": "bfloat16"},
    ],
    ids=["gates and values", "as gpt-oss has them", "bfloat16"],
)
def test_packed_experts_give_what_experts_one_by_one_give(options, num_rows):
    experts, x = loose(**options), random(num_rows, HIDDEN, seed=3)
    expected = experts(x, *routes(num_rows))
    found = experts.packed(lambda one: one)(x, *routes(num_rows))
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def assert_near(experts, packed):
    """Rows are rounded to 8 bits."""
    x = random(20, HIDDEN, seed=3)
    found, expected = packed(x, *routes(20)), experts(x, *routes(20))
    assert (found - expected).abs().max() < 0.03 * expected.abs().max()


ROUNDING = ("int8", "int4", "int4-minimums-16", "int8-minimums-32", "levels4-32", "int4-scattered-32", "e4m3-32")


@pytest.mark.representatives(len(ROUNDING))
@pytest.mark.parametrize("form", ROUNDING)
def test_experts_keep_their_form_and_differ_by_the_rounding_of_rows_alone(form):
    experts = loose(form)
    packed = experts.packed(lambda matrix: matrix)
    assert packed.gates.form == packed.values.form == experts.up.matrices[0].form
    assert_near(experts, packed)


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int4"])
def test_bits_of_a_row_do_not_depend_on_rows_beside_it_nor_on_threads(form):
    packed, x, (experts, weights) = loose(form).packed(lambda one: one), random(600, HIDDEN, seed=3), routes(600)
    whole = packed(x, experts, weights)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(packed(x, experts, weights), whole)
    finally:
        torch.set_num_threads(threads)
    for row in (0, 3, 511, 512, 599):
        one = slice(row, row + 1)
        assert torch.equal(packed(x[one], experts[one], weights[one]), whole[one])


def test_an_expert_that_there_is_not_is_refused():
    packed, (experts, weights) = loose().packed(lambda one: one), routes(2)
    for wrong in (EXPERTS, -1):
        experts[1, 2] = wrong
        with pytest.raises(IndexError, match=f"there are {EXPERTS}"):
            packed(random(2, HIDDEN), experts, weights)


@pytest.mark.representatives(24)
@pytest.mark.parametrize("grouping", [None, Grouping(7, 3, 2), Grouping(3, 2, 1)])
@pytest.mark.parametrize("normalises", [False, True])
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("score", Score)
def test_the_library_chooses_and_weighs_as_it_is_written_step_by_step(score, corrected, normalises, grouping):
    correction = random(21, seed=5) if corrected else None
    routing = Routing(
        num_experts=21,
        num_chosen=4,
        score=score,
        correction=correction,
        normalises=normalises,
        scale=2.5,
        grouping=grouping,
    )
    at = None if correction is None else correction.data_ptr()
    mixture = Mixture(num_experts=21, num_chosen=4, score=score, normalises=normalises, scale=2.5, correction=at)
    if grouping is not None:
        mixture.num_groups, mixture.num_open, mixture.num_best = attrs.astuple(grouping)
    logits = 3 * random(300, 21, seed=6)
    experts, weights = routing.choose(logits)
    found, weighs = native().route(logits, mixture)
    assert torch.equal(found, experts)
    assert torch.allclose(weighs, weights, rtol=3e-6, atol=1e-9)


def test_logits_that_are_no_numbers_choose_experts_that_there_are():
    for groups in ({}, {"num_groups": 5, "num_open": 3, "num_best": 1}):
        mixture = Mixture(num_experts=5, num_chosen=3, score=Score.SOFTMAX, scale=1.0, **groups)
        experts, weights = native().route(torch.full((2, 5), torch.nan), mixture)
        assert experts.tolist() == [[0, 1, 2]] * 2
        assert weights.isnan().all()


@pytest.mark.parametrize("form", sorted(FORMS))
def test_matrices_side_by_side_keep_their_form(form):
    one, other = (FORMS[form](random(6, 64, seed=seed)) for seed in (1, 2))
    both = JoinedWeight([one, other])
    assert both.form == one.form
    assert torch.equal(both.dequantised(), torch.cat([one.dequantised(), other.dequantised()]))


def test_matrices_of_different_forms_become_floats_side_by_side():
    one, other = FORMS["int8"](random(8, 32, seed=1)), FORMS["bfloat16"](random(4, 32, seed=2))
    both = JoinedWeight([one, other])
    assert both.form == "float32"
    assert torch.equal(both.dequantised(), torch.cat([one.dequantised(), other.dequantised()]))


@pytest.mark.representatives(8)
@pytest.mark.parametrize(
    ("in_turn", "index", "form"),
    [
        (False, slice(0, 8), "int8"),
        (False, slice(8, None), "bfloat16"),
        (False, torch.tensor([2, 3, 10, 11]), None),
        (True, slice(0, None, 2), "int8"),
        (True, slice(1, None, 2), "bfloat16"),
        (True, slice(4, 12), None),
        (True, slice(5, 12), "float32"),
        (False, torch.tensor([9, 2]), "float32"),
    ],
)
def test_outputs_of_joined_matrices_keep_the_forms_of_their_parts(in_turn, index, form):
    parts = [FORMS[name](random(8, 32, seed=1)) for name in ("int8", "bfloat16")]
    both = JoinedWeight(parts, in_turn=in_turn)
    found = both.rows(index)
    assert torch.equal(found.dequantised(), both.dequantised()[index])
    assert torch.equal(both.columns(slice(8, 24)).dequantised(), both.dequantised()[:, 8:24])
    if form is None:
        assert isinstance(found, JoinedWeight)
        assert [one.form for one in found.parts] == ["int8", "bfloat16"]
    else:
        assert found.form == form


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
@torch.no_grad()
def test_experts_to_which_no_row_came_are_packed_all_the_same(kind):
    experts = tiny_models.make_model(kind).model.layers[0].mlp.experts
    size, num_experts = experts.down_proj.shape[2 if kind == "gpt_oss" else 1], len(experts.down_proj)
    packed = packed_experts(experts, None, lambda one: one, native(), agree, activation_of)
    x = random(9, size, seed=3)
    chosen = torch.arange(18).view(9, 2) % num_experts
    weights = random(9, 2, seed=4).abs()
    expected = experts(x, chosen, weights)
    assert (packed(x, chosen, weights) - expected).abs().max() < 1e-5 * expected.abs().max()


PUBLISHED = {
    "Qwen3-MoE": (
        "qwen3_moe",
        {"num_experts": 7, "num_local_experts": 7, "num_experts_per_tok": 3, "norm_topk_prob": True},
    ),
    "OLMoE": ("olmoe", {"num_experts": 6, "num_local_experts": 6, "norm_topk_prob": False}),
    "a dense layer first": (
        "glm4_moe",
        {
            "num_local_experts": 5,
            "n_routed_experts": 5,
            "first_k_dense_replace": 1,
            "num_hidden_layers": 3,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
        },
    ),
    "shared experts and some dense layers": (
        "qwen2_moe",
        {"num_experts": 5, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 72, "mlp_only_layers": [1]},
    ),
}


@pytest.mark.representatives(3)
@pytest.mark.parametrize("name", PUBLISHED)
def test_mixtures_of_published_checkpoints_run_in_one_call(name):
    kind, changes = PUBLISHED[name]
    model = families.make_family(kind, **changes)
    for buffer_name, buffer in model.named_buffers():
        if "correction" in buffer_name:
            buffer.copy_(random(*buffer.shape, seed=9))
    assert errors_in_one_call(model) < 3e-5
    layers = decoder_of(model).structure.layers
    mixture = layers[model.config.num_hidden_layers - 1].mixture if kind != "qwen2_moe" else layers[0].mixture
    expected = changes.get("num_experts") or changes["n_routed_experts"]
    assert (mixture.num_experts, mixture.num_chosen) == (expected, model.config.num_experts_per_tok)
    assert bool(mixture.correction) == (kind == "glm4_moe")
    assert mixture.scale == (2.5 if kind == "glm4_moe" else 1.0)


GROUPED = {
    "glm4_moe": {
        "n_group": 4,
        "topk_group": 2,
        "num_local_experts": 12,
        "n_routed_experts": 12,
        "first_k_dense_replace": 0,
    },
    "dots1": {
        "n_group": 3,
        "topk_group": 2,
        "num_local_experts": 12,
        "n_routed_experts": 12,
        "first_k_dense_replace": 0,
    },
    "solar_open": {"n_group": 2, "topk_group": 1, "num_local_experts": 8, "n_routed_experts": 8},
    "exaone_moe": {"n_group": 4, "topk_group": 3, "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8},
}


@pytest.mark.representatives(len(GROUPED))
@pytest.mark.parametrize("kind", GROUPED)
def test_a_choice_within_groups_of_experts_runs_in_one_call(kind):
    model = families.make_family(kind, **GROUPED[kind])
    for buffer_name, buffer in model.named_buffers():
        if "correction" in buffer_name:
            buffer.copy_(random(*buffer.shape, seed=9) / 3)
    assert errors_in_one_call(model) < 3e-5
    mixture = decoder_of(model).structure.layers[1].mixture
    asked = (GROUPED[kind]["n_group"], GROUPED[kind]["topk_group"], 2)
    assert (mixture.num_groups, mixture.num_open, mixture.num_best) == asked


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3"])
def test_groups_of_deepseek_are_read_though_its_attention_is_not(kind):
    changes: dict[str, Any] = {"topk_method": "group_limited_greedy"} if kind == "deepseek_v2" else {}
    # Of fewer than three experts those by the best of each group are always those without groups.
    changes["num_experts_per_tok"] = 4
    sizes = {"n_group": 4, "topk_group": 2, "num_experts": 12, "num_local_experts": 12, "n_routed_experts": 12}
    model = families.make_family(kind, **sizes, **changes, first_k_dense_replace=0)
    assert errors_in_one_call(model) == "layer by layer: its attention is its own in 2 of 2 layers"
    mixture = next(part for part in model.modules() if isinstance(part, FusedMixture))
    assert mixture.routing.grouping == Grouping(4, 2, 1 if kind == "deepseek_v2" else 2)


def test_gates_and_values_for_which_rows_are_rounded_differently_become_floats():
    experts = loose("int8-minimums-32")
    for matrix in experts.up.matrices:
        matrix.minimums[experts.gates] = -128 * matrix.scales[experts.gates]
    packed = experts.packed(lambda matrix: matrix)
    assert packed.gates.form == packed.values.form == "float32"
    assert_near(experts, packed)


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_experts_are_held_as_their_files_have_them_or_rounded(tmp_path, caplog, kind):
    path = tiny_models.save_model(kind, tmp_path, dtype=torch.bfloat16)
    tokens, text = held(path, caplog)
    assert tokens == tiny_models.greedy_reference(path, tiny_models.prompt(20), 8)
    assert "held as bfloat16 (100 %)" in text
    assert "runs in one call" in text
    _, text = held(path, caplog, quantization="int8")
    assert "held as int8 (" in text
    assert "runs in one call" in text


def test_mxfp4_as_published_is_held_exactly_and_runs_in_one_call(tmp_path, caplog):
    from transformers import AutoModelForCausalLM

    config = tiny_models._config("gpt_oss")
    config.update({"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 5})
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").bfloat16()
    made = quantised_checkpoints.Format(table={"quant_method": "mxfp4"}, write=quantised_checkpoints.mxfp4_experts)
    plain, floats, quantised = (tmp_path / name for name in ("plain", "floats", "quantised"))
    model.save_pretrained(plain)
    quantised_checkpoints.quantise_checkpoint(plain, made, quantised, floats)
    _, text = held(quantised, caplog)
    assert "4 bit levels in groups of 32 (" in text
    assert "runs in one call" in text
    assert held(quantised, caplog, pack="off")[0] == tiny_models.greedy_reference(floats, tiny_models.prompt(20), 8)
    # Rows are rounded to 8 bits where weights are integers.
    expected = prompt_logprobs(floats, pack="off")
    assert (prompt_logprobs(quantised) - expected).abs().mean() < 0.1 * (expected - expected.roll(1)).abs().mean()
