"""Decoders that are loaded layer by layer, against the same ones that transformers has loaded whole."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from support.backends import families, peak_memory, tiny_models
from support.backends.families import save_family
from trencadis import LLM, SamplingParams
from trencadis.errors import ModelLoadError
from trencadis.records import ModelSource
from trencadis_torch.attention import adapter
from trencadis_torch.linear.formats.choose import open_source
from trencadis_torch.linear.holding import AS_STORED, FLOAT32, Holding
from trencadis_torch.linear.native import native
from trencadis_torch.linear.replacement import forms_of
from trencadis_torch.loading.inspection import attention_layers
from trencadis_torch.loading.layerwise import LoadedDecoder, NotLayerwiseError, load_layerwise
from trencadis_torch.loading.loader import find_model, load_decoder
from trencadis_torch.loading.self_check import ModelCheck, check_sequences

CPU = torch.device("cpu")


def load(path: Path, form: str = FLOAT32) -> LoadedDecoder:
    adapter.register()
    files = find_model(ModelSource(path=str(path)))
    source = open_source(files.name, files.options, files.config)
    assert source is not None
    return load_layerwise(files, source, holding=Holding(form), native=native(), prepare=lambda _: None)


def whole(path: Path):
    return load_decoder(find_model(ModelSource(path=str(path), dtype="float32")), CPU)


@torch.no_grad()
def logits_of(model, tokens):
    adapter.switch(model, "eager")
    return model(input_ids=tokens[None], use_cache=False).logits[0]


def check_packed(loaded: LoadedDecoder) -> None:
    """Compare the packed modules, over the paged cache, with the logits of the original ones."""
    check = ModelCheck(loaded.model, loaded.layers, layout="ragged", expected=loaded.expected)
    check.compare(loaded.model, replaced=True)


FAMILIES = (
    "llama",
    "qwen3",
    "gemma2",
    "phi3",
    "gpt2",
    "mixtral",
    "gpt_oss",
    "qwen2_moe",
    "deepseek_v3",
    "cohere2",
    "glm4",
    "olmo2",
)


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_original_modules_and_the_packed_ones_give_what_transformers_gives(kind, tmp_path):
    path = save_family(kind, tmp_path)
    loaded, expected = load(path), whole(path)
    for tokens, own in zip(check_sequences(expected, loaded.num_parameters), loaded.expected, strict=True):
        torch.testing.assert_close(own, logits_of(expected, tokens), rtol=1e-4, atol=1e-4)
    check_packed(loaded)
    assert loaded.layers == attention_layers(expected)
    assert loaded.num_parameters == expected.num_parameters()
    assert not any(parameter.is_meta for parameter in loaded.model.parameters())


@pytest.mark.parametrize("is_tied", [False, True])
def test_bfloat16_is_held_as_stored_and_computes_as_float32(is_tied, tmp_path):
    model = tiny_models.make_model("llama")
    model.config.tie_word_embeddings = is_tied
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    loaded = load(tmp_path / "model", AS_STORED)
    assert forms_of(loaded.model).startswith("bfloat16")
    check_packed(loaded)
    expected = whole(tmp_path / "model")
    for tokens, own in zip(check_sequences(expected, 0), loaded.expected, strict=True):
        torch.testing.assert_close(own, logits_of(expected, tokens), rtol=1e-4, atol=1e-4)


def test_files_in_shards_are_read_by_their_index(tmp_path):
    tiny_models.make_model("qwen3").save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded, expected = load(tmp_path), whole(tmp_path)
    tokens = check_sequences(expected, 0)[0]
    torch.testing.assert_close(loaded.expected[0], logits_of(expected, tokens), rtol=1e-4, atol=1e-4)


def changed(path: Path, change) -> Path:
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_weights_that_are_missing_are_refused_in_words(tmp_path):
    path = changed(save_family("llama", tmp_path), lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(
        ModelLoadError, match=r"1 weights are missing .* model\.layers\.1\.mlp\.up_proj\.weight for one"
    ):
        load(path)


def test_weights_of_another_shape_are_refused_in_words(tmp_path):
    def cut(weights):
        weights["model.norm.weight"] = weights["model.norm.weight"][:5].clone()

    path = changed(save_family("llama", tmp_path), cut)
    with pytest.raises(ModelLoadError, match=r"of another shape, model\.norm\.weight for one"):
        load(path)


def test_a_file_that_is_cut_off_is_refused_in_words(tmp_path):
    path = save_family("llama", tmp_path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match="the file is cut off"):
        load(path)


def test_weights_that_are_tied_but_differ_are_held_one_by_one(tmp_path, caplog):
    path = save_family("llama", tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    loaded, expected = load(path), whole(path)
    assert "are tied by config.json, but differ in the files" in caplog.text
    tokens = check_sequences(expected, 0)[0]
    torch.testing.assert_close(loaded.expected[0], logits_of(expected, tokens), rtol=1e-4, atol=1e-4)


def test_a_model_whose_code_reads_weights_of_its_layers_is_not_loaded_so(tmp_path):
    with pytest.raises(NotLayerwiseError, match="its code reads weights of linear layers"):
        load(save_family("sarvam_moe", tmp_path))


BOUND = 300 << 20


def save_large(path: Path, dtype: str, **sizes: int) -> int:
    """Save a model whose weights are more than what is measured besides; returns the bytes of a layer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **{
            "hidden_size": 1024,
            "intermediate_size": 2816,
            "num_hidden_layers": 9,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "vocab_size": 16_000,
            "tie_word_embeddings": True,
            **sizes,
        }
    )
    model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    layer = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    model.save_pretrained(path, max_shard_size="100MB")
    return layer


@pytest.mark.slow
@pytest.mark.representatives(1)
@pytest.mark.parametrize(
    ("dtype", "options"),
    [("bfloat16", {"quantization": "int4"}), ("bfloat16", {}), ("float32", {"quantization": "int8"}), ("float32", {})],
)
def test_loading_takes_the_packed_weights_one_layer_and_300_mib_at_most(dtype, options, tmp_path):
    layer = save_large(tmp_path, dtype)
    done = subprocess.run(
        [sys.executable, peak_memory.__file__, str(tmp_path), json.dumps(options)], capture_output=True, check=True
    )
    took = json.loads(done.stdout.splitlines()[-1])
    assert took["peak"] - took["before"] <= took["weights"] + layer + BOUND
    if not options:
        assert took["weights"] < 1.02 * sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))


@pytest.mark.slow
@pytest.mark.representatives(1)
@pytest.mark.parametrize("layout", [{"tensor": 2}, {"tensor": 1, "pipeline": 2}], ids=str)
def test_a_rank_takes_its_packed_share_its_part_of_a_layer_and_300_mib_at_most(layout, tmp_path):
    layer = save_large(tmp_path, "float32", num_hidden_layers=16, tie_word_embeddings=False)
    for took in peak_memory.of_ranks(tmp_path, {}, **layout):
        assert took["peak"] - took["before"] <= took["weights"] + layer // layout["tensor"] + BOUND


@pytest.mark.slow
@pytest.mark.representatives(1)
@pytest.mark.parametrize("expert", [1, 2])
def test_a_rank_takes_its_experts_as_their_file_has_them(expert, tmp_path):
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_local_experts": 16, "num_hidden_layers": 12}
    config = MixtralConfig(**sizes, num_attention_heads=8, num_key_value_heads=4, vocab_size=4000)
    model = MixtralForCausalLM(config).bfloat16()
    layer = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    model.save_pretrained(tmp_path, max_shard_size="100MB")
    stored = sum(parameter.nbytes for parameter in model.parameters())
    del model
    for took in peak_memory.of_ranks(tmp_path, {}, tensor=2, expert=expert):
        assert took["weights"] < 1.05 * stored / 2
        assert took["peak"] - took["before"] <= took["weights"] + layer // 2 + BOUND


GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


def served(path, length, **backend):
    with LLM({"path": str(path), "tokenizer": "none"}, backend={"torch": {"num_threads": 1, **backend}}) as llm:
        return list(llm.generate([tiny_models.prompt(length)], GREEDY)[0].outputs[0].token_ids)


@pytest.mark.parametrize("kind", families.PUBLISHED)
def test_a_published_structure_has_the_tokens_of_transformers(tmp_path, kind):
    path = families.save_family(kind, tmp_path)
    assert served(path, 40) == tiny_models.greedy_reference(path, tiny_models.prompt(40), 12)


def test_a_model_that_packed_layers_do_not_reproduce_is_served_without_them(tmp_path, monkeypatch, caplog):
    from transformers import LlamaForCausalLM

    path = tiny_models.save_model("llama", tmp_path)
    expected = served(path, 20, pack="off")
    plain = LlamaForCausalLM.forward

    @functools.wraps(plain)
    def forward(self, *args, **options):
        result = plain(self, *args, **options)
        if not isinstance(self.lm_head, nn.Linear):
            result.logits = -result.logits
        return result

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    assert served(path, 20) == expected
    assert "differ from the model's own" in caplog.text
    assert "It is loaded again without packed layers." in caplog.text
    with pytest.raises(ModelLoadError, match="packed layers differ"):
        served(path, 20, quantization="int8")


def test_dynamic_rotary_embeddings_take_texts_of_the_stretched_length_and_are_the_same_for_each(tmp_path):
    """As with a base stretched beforehand, whatever the length of a text and of its neighbours."""
    model = tiny_models.make_model("llama")
    config = model.config
    config.max_position_embeddings = 64
    config.rope_parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    model.save_pretrained(tmp_path / "dynamic")
    dim = config.hidden_size // config.num_attention_heads
    theta = 1e4 * (4.0 * 4.0 - 3.0) ** (dim / (dim - 2))
    config.max_position_embeddings = 256
    config.rope_parameters = {"rope_type": "default", "rope_theta": theta}
    model.save_pretrained(tmp_path / "stretched")
    for length in (20, 200):
        expected = tiny_models.greedy_reference(tmp_path / "stretched", tiny_models.prompt(length), 12)
        assert served(tmp_path / "dynamic", length) == expected


def test_no_progress_bar_is_printed_while_a_gguf_file_is_read(tmp_path, capfd):
    pytest.importorskip("gguf")
    served(tiny_models.save_gguf(tmp_path), 4)
    assert "it/s" not in capfd.readouterr().err
