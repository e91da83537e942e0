"""Parts of weights as the files have them, against parts of what transformers loads."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.backends import tiny_models
from support.backends.families import SERVED, save_family, save_with_biases
from support.backends.quantised_checkpoints import FORMATS, quantise_checkpoint
from support.backends.rank_threads import make_groups
from trencadis.errors import ModelLoadError
from trencadis.records import ModelSource
from trencadis_torch.linear.formats.choose import open_source
from trencadis_torch.linear.held import ChannelWeight, FloatWeight, GroupedWeight, HeldWeight
from trencadis_torch.loading.loader import find_model, load_whole
from trencadis_torch.loading.named_weights import NamedWeights
from trencadis_torch.loading.skeleton import skeleton
from trencadis_torch.parallel import loading
from trencadis_torch.parallel.loading import divide, load_share
from trencadis_torch.parallel.parts import ShareWeights
from trencadis_torch.parallel.placement import ExpertPlacement
from trencadis_torch.parallel.plan import expand_plan
from trencadis_torch.parallel.reading import READ_IN_PARTS, LoadedWeights, StoredWeights, materialise, missing
from trencadis_torch.parallel.sharding import shard

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


ALL_WHOLE = {"gpt2": "transformer.wte", "opt": "model.decoder.embed_tokens", "gpt_bigcode": "transformer.wte"}
FAMILIES = [kind for kind in SERVED if kind in READ_IN_PARTS or kind == "gemma3"]
"""The tiny ``gemma3`` is of the type ``gemma3_text``."""


@pytest.fixture(scope="module")
def family_path(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")

    def save(kind):
        return root / kind if (root / kind).is_dir() else save_with_biases(kind, root)

    return save


def share_of(files, rank, size, weights):
    model = skeleton(files)
    name = ALL_WHOLE.get(files.config.model_type)
    sharding = shard(model, make_groups(size)[rank].tensor, {} if name is None else {name: "embedding_rowwise"})
    assert missing(model, sharding.pieces, weights) == []
    materialise(model, sharding.pieces, weights, dtype=torch.float32, device=CPU)
    return model


def state(model):
    found = dict(model.named_parameters(remove_duplicate=False))
    return {**found, **dict(model.named_buffers())}


@pytest.mark.parametrize("kind", FAMILIES)
def test_files_read_in_parts_give_what_transformers_loads(family_path, kind):
    files = find_model(ModelSource(path=str(family_path(kind))))
    whole = LoadedWeights(load_whole(files).float())
    for rank in (0, 1):
        found = state(share_of(files, rank, 2, StoredWeights(files)))
        expected = state(share_of(files, rank, 2, whole))
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert tensor.device == CPU, name
            assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("kind", FAMILIES)
def test_buffers_of_a_model_without_memory_are_those_of_a_loaded_one(family_path, kind):
    files = find_model(ModelSource(path=str(family_path(kind))))
    loaded = dict(load_whole(files).named_buffers())
    built = dict(skeleton(files).named_buffers())
    assert built.keys() == loaded.keys()
    persistent = load_whole(files).state_dict()
    for name, buffer in built.items():
        assert buffer.device == CPU, name
        assert name in persistent or torch.equal(buffer, loaded[name]), name


@pytest.mark.parametrize("kind", ["llama", "gemma3", "phi3", "mixtral", "qwen3_moe"])
@pytest.mark.parametrize("size", [2, 4])
def test_no_more_is_read_than_is_kept(model_path, kind, size):
    files = find_model(ModelSource(path=str(model_path(kind))))
    for rank in range(size):
        weights = StoredWeights(files)
        model = share_of(files, rank, size, weights)
        kept = sum(one.nbytes for one in {id(p): p for p in model.parameters()}.values())
        padding = 2 * size * model.config.hidden_size * 4
        buffers = sum(one.nbytes for one in model.buffers())
        assert kept - padding <= weights.num_bytes <= kept + buffers


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_of_whole_experts_those_of_other_ranks_are_not_read(model_path, kind):
    files = find_model(ModelSource(path=str(model_path(kind))))
    weights, whole = StoredWeights(files), LoadedWeights(load_whole(files).float())
    states = []
    for source in (weights, whole):
        model = skeleton(files)
        sharding = shard(model, make_groups(2)[1].tensor, {}, experts=ExpertPlacement(num_ranks=2))
        materialise(model, sharding.pieces, source, dtype=torch.float32, device=CPU)
        states.append(state(model))
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])
    assert weights.num_bytes <= sum(one.nbytes for one in model.parameters())


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_experts_that_are_placed_by_load_are_read_in_their_order(model_path, kind):
    """Of Mixtral each expert has weights of its own in the files, of gpt-oss all are stacked."""
    files = find_model(ModelSource(path=str(model_path(kind))))
    loads = dict.fromkeys(range(3), (1.0, 10.0, 1.0, 1.0))
    placement = ExpertPlacement(num_ranks=2, loads=loads, num_redundant=2)
    whole = LoadedWeights(load_whole(files).float())
    for rank, experts in enumerate(placement.of("layers.0.", 4).ranks):
        model, weights = skeleton(files), StoredWeights(files)
        sharding = shard(model, make_groups(2)[rank].tensor, {}, experts=placement)
        materialise(model, sharding.pieces, weights, dtype=torch.float32, device=CPU)
        for layer in range(3):
            name = f"model.layers.{layer}.mlp.experts"
            for own, found in model.get_submodule(name).local.named_parameters():
                expected = whole._tensors[f"{name}.{own}"][list(experts)]
                assert torch.equal(found, expected), own
        assert weights.num_bytes <= sum(one.nbytes for one in model.parameters())


def test_weights_in_several_files_are_found_by_their_index(tmp_path):
    model = tiny_models.make_model("llama")
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    save_file({"consolidated": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    files = find_model(ModelSource(path=str(tmp_path)))
    found = state(share_of(files, 1, 2, StoredWeights(files)))
    expected = state(share_of(files, 1, 2, LoadedWeights(model)))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_file_of_an_index_that_is_missing_is_named(tmp_path):
    tiny_models.make_model("llama").save_pretrained(tmp_path, max_shard_size="40KB")
    next(iter(sorted(tmp_path.glob("*.safetensors")))).unlink()
    with pytest.raises(OSError, match="names model-00001-of"):
        StoredWeights(find_model(ModelSource(path=str(tmp_path))))


def test_names_of_the_base_model_alone_and_mixtrals_old_ones_are_found(tmp_path):
    model = tiny_models.make_model("mixtral")
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    old = {
        name.removeprefix("model.").replace(".mlp.", ".block_sparse_moe."): one for name, one in load_file(path).items()
    }
    save_file(old, path)
    files = find_model(ModelSource(path=str(tmp_path)))
    found = state(share_of(files, 1, 2, StoredWeights(files)))
    expected = state(share_of(files, 1, 2, LoadedWeights(model)))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_tied_embeddings_stay_tied_and_are_read_once(tmp_path):
    tiny_models.save_changed("llama", tmp_path, tie_word_embeddings=True)
    files = find_model(ModelSource(path=str(tmp_path)))
    weights = StoredWeights(files)
    model = share_of(files, 0, 2, weights)
    assert model.lm_head.local.weight is model.model.embed_tokens.local.weight
    assert weights.num_bytes <= sum(one.nbytes for one in model.parameters())


def loaded(path, caplog, **source):
    with caplog.at_level(logging.WARNING, "trencadis.torch"):
        return load_share(find_model(ModelSource(path=str(path), **source)), CPU, make_groups(2)[0], {})


def test_families_that_were_not_tried_are_read_whole_and_a_warning_says_so(tmp_path, caplog):
    model, _ = loaded(save_family("arcee", tmp_path), caplog)
    assert not caplog.records
    parts = state(model)
    path = save_family("gpt_neox", tmp_path)
    loaded(path, caplog)
    assert "reads all weights" in caplog.text
    assert "files of gpt_neox were not tried" in caplog.text
    assert parts


def test_weights_that_the_files_lack_are_named_by_transformers(tmp_path, caplog):
    path = tiny_models.save_model("llama", tmp_path)
    file = path / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"1 weights are missing .* model.layers.1.mlp.up_proj.weight"):
        loaded(path, caplog)
    assert "model.layers.1.mlp.up_proj.weight is not in them" in caplog.text


def test_buffers_that_the_files_lack_are_missing_too(tmp_path):
    path = save_family("deepseek_v3", tmp_path)
    file = path / "model.safetensors"
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    weights = load_file(file)
    del weights[name]
    save_file(weights, file, metadata={"format": "pt"})
    files = find_model(ModelSource(path=str(path)))
    model = skeleton(files)
    sharding = shard(model, make_groups(2)[0].tensor, {})
    assert missing(model, sharding.pieces, StoredWeights(files)) == [name]


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_data_type_is_that_of_one_process(tmp_path, caplog, stored):
    path = tiny_models.save_model("llama", tmp_path, dtype=stored)
    assert loaded(path, caplog)[0].dtype == torch.float32
    assert loaded(path, caplog, dtype="bfloat16")[0].dtype == torch.bfloat16
    config = json.loads((path / "config.json").read_text())
    config.pop("dtype")
    (path / "config.json").write_text(json.dumps(config))
    files = find_model(ModelSource(path=str(path)))
    assert StoredWeights(files).dtype() == stored


def test_generation_config_comes_along(model_path, caplog):
    assert loaded(model_path("llama"), caplog)[0].generation_config.eos_token_id == 2


def test_experts_of_odd_sizes_run_one_by_one(model_path):
    files = find_model(ModelSource(path=str(model_path("qwen3_moe"))))
    found = {
        size: load_share(files, CPU, make_groups(size)[0], {})[0].config._experts_implementation for size in (2, 4)
    }
    assert found[4] == "eager"
    assert loading.ALIGNMENT == 16
    assert expand_plan(skeleton(files), {"lm_head": "replicate"}) == {}
