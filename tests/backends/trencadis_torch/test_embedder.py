from __future__ import annotations

import numpy as np
import pytest
import torch

from support.backends import tiny_encoders, tiny_models
from trencadis.records import ModelSource
from trencadis_torch import embedder
from trencadis_torch.attention import adapter
from trencadis_torch.embedder import DecoderEmbedder, EncoderEmbedder
from trencadis_torch.loading.inspection import attention_layers
from trencadis_torch.loading.loader import find_model, load_decoder, load_weights
from trencadis_torch.loading.pooling_config import PoolingConfig

CPU = torch.device("cpu")
LENGTHS = (1, 5, 30, 5, 2, 30, 17, 48)


def texts(seed=0):
    return [np.array(tiny_models.prompt(n, seed=seed + n), np.int32) for n in LENGTHS]


def decoder(path, pooling="last", **options):
    model = load_decoder(find_model(ModelSource(path=str(path), **options)), CPU)
    layers = attention_layers(model)
    adapter.register()
    adapter.switch(model, adapter.PAGED)
    return DecoderEmbedder(model.base_model, PoolingConfig(pooling=pooling), layers)


def encoder(path, pooling="mean", **options):
    from transformers import AutoModel

    model = load_weights(find_model(ModelSource(path=str(path), **options)), CPU, AutoModel)
    return EncoderEmbedder(model, PoolingConfig(pooling=pooling))


@pytest.fixture(scope="module")
def encoder_path(tmp_path_factory):
    root = tmp_path_factory.mktemp("encoders")
    return lambda kind: path if (path := root / kind).is_dir() else tiny_encoders.save_encoder(kind, root)


def check(found, path, pooling):
    expected = torch.stack([tiny_encoders.reference_vector(path, text, pooling) for text in texts()])
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)
    assert found.dtype == np.float32


@pytest.mark.representatives(4)
@pytest.mark.parametrize("kind", tiny_models.ARCHITECTURES)
def test_decoders_embed_as_transformers_does(model_path, kind):
    check(decoder(model_path(kind)).embed(texts()), model_path(kind), "last")


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_decoders_pool_as_they_are_told(model_path, pooling):
    check(decoder(model_path("gemma3"), pooling).embed(texts()), model_path("gemma3"), pooling)


@pytest.mark.representatives(4)
@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "mpnet", "modernbert"])
@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_encoders_embed_as_transformers_does_without_padding(encoder_path, kind, pooling):
    check(encoder(encoder_path(kind), pooling).embed(texts()), encoder_path(kind), pooling)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_vectors_of_models_in_sixteen_bits_are_float32_and_close(encoder_path, model_path, dtype):
    for make, path in ((encoder, encoder_path("bert")), (decoder, model_path("llama"))):
        exact, rounded = make(path).embed(texts()), make(path, dtype=dtype).embed(texts())
        assert rounded.dtype == np.float32
        assert (exact * rounded).sum(axis=1).min() > 0.98


def test_texts_of_like_lengths_share_a_forward_and_little_is_padding(encoder_path, monkeypatch):
    monkeypatch.setattr(embedder, "SMALL_BATCH", 24)
    one = encoder(encoder_path("bert"))
    shapes = []
    one._model.register_forward_pre_hook(
        lambda module, args, options: shapes.append(tuple(options["input_ids"].shape)), with_kwargs=True
    )
    lengths = [40, 8, 33, 41, 3, 3, 4]
    one.embed([np.ones(length, np.int32) for length in lengths])
    assert shapes == [(3, 4), (1, 8), (3, 41)]
