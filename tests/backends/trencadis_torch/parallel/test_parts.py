"""Parts of weights as the files have them, against parts of what transformers loads."""

from __future__ import annotations

import pytest
import torch

from support.backends import tiny_models
from support.backends.families import save_with_biases
from support.backends.quantised_checkpoints import FORMATS, quantise_checkpoint
from support.backends.rank_threads import make_groups
from trencadis.records import ModelSource
from trencadis_torch.linear.formats.choose import open_source
from trencadis_torch.linear.held import ChannelWeight, FloatWeight, GroupedWeight, HeldWeight
from trencadis_torch.loading.loader import find_model, load_whole
from trencadis_torch.loading.named_weights import NamedWeights
from trencadis_torch.loading.skeleton import skeleton
from trencadis_torch.parallel.loading import divide
from trencadis_torch.parallel.parts import ShareWeights
from trencadis_torch.parallel.reading import LoadedWeights, materialise

CPU = torch.device("cpu")
LAYOUTS = ({"tensor": 2}, {"tensor": 4}, {"tensor": 1, "pipeline": 2}, {"tensor": 2, "pipeline": 2})


def share_weights(path, groups):
    """Return a share, and what gives it its weights."""
    files = find_model(ModelSource(path=str(path)))
    model = skeleton(files)
    weights = NamedWeights(model, open_source(files.name, files.options, files.config))
    return model, ShareWeights(model, divide(model, groups, {}).pieces, weights)


def expected_of(path, groups):
    files = find_model(ModelSource(path=str(path)))
    model = skeleton(files)
    pieces = divide(model, groups, {}).pieces
    materialise(model, pieces, LoadedWeights(load_whole(files).float()), dtype=torch.float32, device=CPU)
    return {name: one for name, one in model.state_dict().items() if not name.endswith(".like")}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "phi3", "qwen3_moe", "mixtral", "deepseek_v3", "glm4"])
def test_parts_are_those_of_the_model_that_transformers_loads(kind, layout, tmp_path):
    path = save_with_biases(kind.removesuffix("_text"), tmp_path)
    for groups in make_groups(**layout):
        expected = expected_of(path, groups)
        model, weights = share_weights(path, groups)
        matrices = {name for name, one in model.state_dict().items() if one.dim() == 2}
        found = dict(weights.read([name for name in expected if weights.has(name)], matrices.__contains__))
        assert found.keys() == expected.keys()
        for name, part in found.items():
            assert isinstance(part, HeldWeight) == (name in matrices)
            floats = part.dequantised() if isinstance(part, HeldWeight) else part.float()
            assert torch.equal(floats, expected[name].float()), name


def test_a_vocabulary_that_is_not_divided_evenly_ends_with_rows_of_zeros(tmp_path):
    tiny_models.save_changed("llama", tmp_path, tie_word_embeddings=True)
    for groups in make_groups(4):
        expected = expected_of(tmp_path, groups)
        _, weights = share_weights(tmp_path, groups)
        for name in ("model.embed_tokens.local.weight", "lm_head.local.weight"):
            found = weights.matrix(name)
            assert found.shape == (33, 48)
            assert torch.equal(found.dequantised(), expected[name])
    assert not found.dequantised()[32:].any()
    assert found.dequantised()[:32].any()


def test_of_a_vocabulary_of_fewer_tokens_than_rows_a_rank_has_zeros_alone(tmp_path):
    tiny_models.save_changed("llama", tmp_path, vocab_size=9)
    groups = make_groups(4)[3]
    _, weights = share_weights(tmp_path, groups)
    name = "model.embed_tokens.local.weight"
    ((found, zeros),) = weights.read([name], lambda _: True)
    assert found == name
    assert not zeros.dequantised().any()
    assert torch.equal(weights.matrix(name).dequantised(), expected_of(tmp_path, groups)[name])


@pytest.mark.representatives(4)
@pytest.mark.parametrize("kind", ["gptq", "gptq_act_order", "fp8", "compressed_nvfp4"])
def test_a_part_of_a_quantised_matrix_holds_no_more_than_it(kind, tmp_path):
    plain, path = tiny_models.save_model("llama", tmp_path / "plain"), tmp_path / "quantised"
    quantise_checkpoint(plain, FORMATS[kind], path, tmp_path / "reference")
    name = "model.layers.0.mlp.down_proj.local.weight", "model.layers.0.mlp.up_proj.weight"
    whole = expected_of(tmp_path / "reference", make_groups(2)[1])
    _, weights = share_weights(path, make_groups(2)[1])
    for one, part in weights.read(name, lambda _: True):
        is_rounded = part.form == "bfloat16"  # inputs of groups that lie apart
        assert is_rounded == (kind == "gptq_act_order" and "down" in one)
        expected, error = whole[one].float(), 2.0**-8 if is_rounded else 2.0**-21 if kind == "compressed_nvfp4" else 0
        torch.testing.assert_close(part.dequantised(), expected, rtol=error, atol=error * float(expected.abs().max()))
        assert part.values.untyped_storage().nbytes() == part.values.nbytes


def grouped(outputs=5, inputs=96, group=32):
    made = torch.Generator().manual_seed(1)
    scales, minimums = torch.randn(2, outputs, inputs // group, generator=made)
    values = torch.randint(0, 16, (outputs, inputs), generator=made, dtype=torch.uint8)
    return GroupedWeight(values, scales, minimums, 4)


@pytest.mark.parametrize(("first", "last", "group"), [(32, 64, 32), (0, 96, 32), (48, 96, 16), (64, 96, 32)])
def test_inputs_of_groups_keep_their_values_and_groups_are_as_large_as_fits(first, last, group):
    weight = grouped()
    part = weight.columns(slice(first, last))
    assert part.group == group
    assert torch.equal(part.dequantised(), weight.dequantised()[:, first:last])


def test_groups_that_would_be_too_small_become_floats():
    part = grouped().columns(slice(8, 40))
    assert isinstance(part, FloatWeight)
    assert torch.equal(part.values, grouped().dequantised()[:, 8:40])


def test_inputs_of_channels_keep_the_scales_of_all():
    weight = ChannelWeight(torch.arange(-6, 6, dtype=torch.int8).view(3, 4), torch.tensor([0.5, 1.0, 3.0]))
    assert torch.equal(weight.columns(slice(1, 3)).dequantised(), weight.dequantised()[:, 1:3])


def test_a_part_of_outputs_is_a_view_of_the_file(model_path):
    path = model_path("llama")
    _, weights = share_weights(path, make_groups(2)[1])
    part = weights.matrix("model.layers.0.mlp.up_proj.weight")
    assert not part.values.untyped_storage().resizable()
    assert weights.matrix("model.layers.0.mlp.down_proj.local.weight").values.is_contiguous()
