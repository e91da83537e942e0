from __future__ import annotations

import numpy as np
import pytest

from support.backends import gaudi_engines, tiny_models
from trencadis.errors import BackendError
from trencadis.records import EmbeddingRequest
from trencadis_gaudi.embedder import TextSizes

LENGTHS = (1, 5, 30, 5, 2, 31, 17, 90, 33, 64, 3)
SIZES = TextSizes(block_size=16, max_model_len=96, max_tokens=64)


def test_a_text_has_the_next_row_that_is_long_enough():
    assert [SIZES.query_len(length) for length in (1, 16, 17, 33, 64, 65, 96)] == [16, 16, 32, 64, 64, 96, 96]


def test_table_of_sizes_is_all_that_texts_are_ever_padded_to():
    assert SIZES.table() == [(1, 96), (4, 16), (2, 32), (1, 64), (2, 16), (1, 32), (1, 16)]
    assert len(TextSizes(block_size=128, max_model_len=8192, max_tokens=8192).table()) == 28
    for max_model_len, max_tokens in ((1, 1), (16, 8), (100, 1000), (8192, 2048), (129, 300)):
        sizes = TextSizes(block_size=16, max_model_len=max_model_len, max_tokens=max_tokens)
        table = set(sizes.table())
        assert {sizes.query_len(length) for length in range(1, max_model_len + 1)} == {length for _, length in table}
        assert all((sizes.max_texts(length), length) in table for _, length in table)
        assert all(rows == 1 or rows * length <= max_tokens for rows, length in table)


def vectors(path, backend="gaudi", *, tables=None, lengths=LENGTHS, **options):
    """The vectors of texts of an engine, in micro-batches, and its count of recompilations."""
    options = {"strategy_options": {"limit": 1}, **options}
    engine = gaudi_engines.open_engine(path, backend=backend, tables=tables, **options)
    for index, length in enumerate(lengths):
        engine.take(EmbeddingRequest(request_id=str(index), token_ids=tuple(tiny_models.prompt(length, seed=index))))
    found = {}
    while engine.has_work:
        found.update((one.request_id, one) for one in engine.step().embeddings)
    assert not [one.error for one in found.values() if one.error]
    metrics = engine._executor._rank.backend.watch.num_recompilations if backend == "gaudi" else 0
    engine.close()
    return np.stack([found[str(index)].vector for index in range(len(lengths))]), metrics


NIGHTLY = [("gemma3", {"mode": mode}) for mode in ("compile", "eager")]
NIGHTLY += [("llama", {"mode": "compile", "regional": False})]


@pytest.mark.parametrize(
    ("kind", "options"), [("gemma3", {}), *(pytest.param(*one, marks=pytest.mark.nightly) for one in NIGHTLY)]
)
def test_vectors_are_those_of_the_torch_backend_and_nothing_is_compiled_after_the_warm_up(model_path, kind, options):
    """Layers with a sliding window and without; 1e-5 of vectors of length 1, in float32."""
    frozen = options.get("mode") != "eager"
    expected, _ = vectors(model_path(kind), "torch")
    found, recompilations = vectors(model_path(kind), embeddings=True, emulated_frozen=frozen, **options)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert recompilations == 0


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("kind", tiny_models.ARCHITECTURES)
def test_every_pooling_of_every_architecture(model_path, kind, pooling):
    tables = {"embedding": {"pooling": pooling}}
    expected, _ = vectors(model_path(kind), "torch", tables=tables)
    found, _ = vectors(model_path(kind), tables=tables, warmup=False)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.slow
def test_sizes_that_no_warm_up_prepared_are_compiled_and_counted(model_path):
    """Once each: a second text of the same size compiles nothing."""
    path = model_path("llama")
    once, twice, both = (vectors(path, lengths=lengths, warmup=False)[1] for lengths in ((20,), (20, 90, 30), (20, 90)))
    assert 0 < once < both == twice


@pytest.mark.nightly  # of a backend without an engine: its conformance suite
def test_tokens_are_the_same_beside_texts_that_are_embedded(model_path):
    options = {"embeddings": True, "emulated_frozen": True, "strategy_options": {"limit": 1}}
    engines = [gaudi_engines.open_engine(model_path("llama"), **options) for _ in range(2)]
    for index, length in enumerate(LENGTHS):
        engines[0].take(EmbeddingRequest(request_id=f"text {index}", token_ids=tuple(tiny_models.prompt(length))))
    alone, beside = (gaudi_engines.serve(engine, 5) for engine in reversed(engines))
    assert gaudi_engines.tokens(alone) == gaudi_engines.tokens(beside)
    for engine in engines:
        engine.close()


def test_closed_backend_does_not_embed(model_path):
    engine = gaudi_engines.open_engine(model_path("llama"), mode="eager")
    backend = engine._executor._rank.backend
    assert backend.embed([np.array([5, 6], np.int32)]).shape == (1, backend._model().facts.embedding_size)
    backend.close()
    with pytest.raises(BackendError, match="does not embed"):
        backend.embed([np.array([5, 6], np.int32)])
