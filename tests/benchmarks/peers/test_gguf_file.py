"""Names and the order of rows in GGUF files; the order against the definition of both rotations."""

from __future__ import annotations

import numpy as np
import pytest

from peers.makers.gguf_file import gguf_name, interleaved

HEAD_DIM = 8


def rotated(vector: np.ndarray, angles: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    out = vector.copy()
    out[first] = vector[first] * np.cos(angles) - vector[second] * np.sin(angles)
    out[second] = vector[second] * np.cos(angles) + vector[first] * np.sin(angles)
    return out


def test_pairs_next_to_each_other_are_the_halves_of_transformers() -> None:
    random = np.random.default_rng(0)
    query, key, state = random.normal(size=(HEAD_DIM, 5)), random.normal(size=(HEAD_DIM, 5)), random.normal(size=5)
    angles = random.uniform(size=HEAD_DIM // 2)
    halves = np.arange(HEAD_DIM // 2), np.arange(HEAD_DIM // 2, HEAD_DIM)
    pairs = np.arange(0, HEAD_DIM, 2), np.arange(1, HEAD_DIM, 2)
    expected = rotated(query @ state, angles, *halves) @ (key @ state)
    found = rotated(interleaved(query, 1) @ state, angles, *pairs) @ (interleaved(key, 1) @ state)
    assert found == pytest.approx(expected)


def test_heads_keep_their_rows() -> None:
    weight = np.arange(16.0).reshape(16, 1)
    assert interleaved(weight, 2)[:8].tolist() == interleaved(weight[:8], 1).tolist()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.norm.weight", "output_norm.weight"),
        ("model.layers.7.self_attn.q_norm.weight", "blk.7.attn_q_norm.weight"),
        ("model.layers.0.mlp.down_proj.weight", "blk.0.ffn_down.weight"),
    ],
)
def test_tensors_have_the_names_of_gguf(name: str, expected: str) -> None:
    assert gguf_name(name) == expected


def test_a_tensor_without_a_name_is_refused() -> None:
    with pytest.raises(KeyError, match="router"):
        gguf_name("model.layers.0.mlp.router.weight")
