"""Weights of .gguf files by a model's names: against the model that was written, and the blocks' own dequantisation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.backends import tiny_models
from support.gguf_writing import random_blocks, write_gguf
from trencadis.errors import ModelLoadError
from trencadis.gguf_file import read_gguf
from trencadis_torch.linear.formats.gguf import GgufSource
from trencadis_torch.linear.formats.gguf_blocks import BlocksWeight
from trencadis_torch.linear.held import FloatWeight

gguf = pytest.importorskip("gguf")

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
SIZES = {
    ".context_length": 64,
    ".embedding_length": 256,
    ".block_count": 1,
    ".feed_forward_length": 256,
    ".attention.head_count": 4,
    ".attention.head_count_kv": 2,
    ".attention.key_length": 64,
    ".rope.dimension_count": 64,
    ".attention.layer_norm_rms_epsilon": 1e-5,
    ".vocab_size": 8,
}


def tensors_of(kind: str = "Q4_K", **changed: Any) -> dict[str, Any]:
    shapes = {
        "token_embd": (8, 256),
        "blk.0.attn_q": (256, 256),
        "blk.0.attn_k": (128, 256),
        "blk.0.attn_v": (128, 256),
        "blk.0.attn_output": (256, 256),
        "blk.0.ffn_gate": (256, 256),
        "blk.0.ffn_up": (256, 256),
        "blk.0.ffn_down": (256, 256),
    }
    blocks = {f"{name}.weight": (random_blocks(kind, shape, seed=7), kind) for name, shape in shapes.items()}
    norms = {
        name: np.full(256, 1.5, np.float32)
        for name in ("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight")
    }
    return blocks | norms | changed


def source_of(path: Path) -> GgufSource:
    from trencadis_torch.loading.gguf_config import gguf_config

    file = read_gguf(path)
    return GgufSource(file, gguf_config(file))


def as_of_llama(rows: Any, num_heads: int) -> Any:
    """Return rows of a projection as Llama has them: llama.cpp has pairs beside each other, transformers halves."""
    return rows.reshape(num_heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def test_floats_are_the_models_own(tmp_path: Path) -> None:
    source, model = source_of(tiny_models.save_gguf(tmp_path)), tiny_models.make_model("llama")
    expected = model.state_dict()
    assert source.names() == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(source.tensor(name), tensor)
        assert source.shape(name) == tuple(tensor.shape)
        if tensor.dim() == 2:
            held = source.weight(name)
            assert isinstance(held, FloatWeight)
            assert torch.equal(held.values, tensor)
    assert source.format == "GGUF, F32"
    assert source.dtype is torch.float32


def test_floats_in_order_are_views_of_the_file(tmp_path: Path) -> None:
    source = source_of(tiny_models.save_gguf(tmp_path))
    held = source.weight("model.layers.0.mlp.up_proj.weight")
    assert isinstance(held, FloatWeight)
    assert held.values.data_ptr() == source.tensor("model.layers.0.mlp.up_proj.weight").data_ptr()


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_narrow_floats_stay_narrow(tmp_path: Path, kind: str) -> None:
    dtype = {"F16": torch.float16, "BF16": torch.bfloat16}[kind]
    plain = torch.randn(256, 256).to(dtype)
    changed = {"blk.0.attn_q.weight": (plain.view(torch.uint8).numpy(), kind)}
    source = source_of(write_gguf(tmp_path / "a.gguf", "llama", metadata=SIZES, tensors=tensors_of(**changed)))
    held = source.weight(Q_PROJ)
    assert held.form == str(dtype).removeprefix("torch.")
    assert torch.equal(held.dequantised(), torch.from_numpy(as_of_llama(plain.float().numpy(), 4)))


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0"])
def test_blocks_stay_blocks_and_rows_are_the_models(tmp_path: Path, kind: str) -> None:
    tensors = tensors_of(kind)
    source = source_of(write_gguf(tmp_path / "a.gguf", "llama", metadata=SIZES, tensors=tensors))
    plain = gguf.quants.dequantize(tensors["blk.0.attn_q.weight"][0], gguf.GGMLQuantizationType[kind])
    held = source.weight(Q_PROJ)
    assert isinstance(held, BlocksWeight)
    assert held.raw.nbytes == tensors["blk.0.attn_q.weight"][0].nbytes
    assert torch.equal(held.rows(slice(3, 9)).dequantised(), torch.from_numpy(as_of_llama(plain, 4))[3:9])
    assert torch.equal(held.columns(slice(32, 64)).dequantised(), torch.from_numpy(as_of_llama(plain, 4))[:, 32:64])
    assert torch.equal(held.dequantised(), torch.from_numpy(as_of_llama(plain, 4)))
    assert torch.equal(source.tensor(Q_PROJ), held.dequantised())
    assert not np.array_equal(plain, as_of_llama(plain, 4))
    up = gguf.quants.dequantize(tensors["blk.0.ffn_up.weight"][0], gguf.GGMLQuantizationType[kind])
    assert torch.equal(source.weight("model.layers.0.mlp.up_proj.weight").dequantised(), torch.from_numpy(up))
    assert source.format == f"GGUF, {kind}"


def test_norms_of_gemma_are_one_less(tmp_path: Path) -> None:
    more = ("post_attention_norm", "post_ffw_norm", "attn_q_norm", "attn_k_norm")
    tensors = tensors_of() | {
        f"blk.0.{name}.weight": np.full(64 if "_q_" in name or "_k_" in name else 256, 1.5, np.float32) for name in more
    }
    source = source_of(write_gguf(tmp_path / "a.gguf", "gemma3", metadata=SIZES, tensors=tensors))
    norms = [name for name in source.names() if "norm" in name]
    assert len(norms) == 7
    for name in norms:
        assert set(source.tensor(name).tolist()) == {0.5}
    assert "lm_head.weight" not in source.names()
    assert torch.equal(source.weight(Q_PROJ).dequantised()[:, 0], source.tensor(Q_PROJ)[:, 0])


def test_experts_of_a_mixture_are_one_weight(tmp_path: Path) -> None:
    tensors = {
        name: one
        for name, one in tensors_of("Q8_0").items()
        if ".ffn_g" not in name and ".ffn_u" not in name and ".ffn_d" not in name
    }
    experts = {name: random_blocks("Q8_0", (3 * 64, 256), seed=seed) for seed, name in enumerate(("gate", "up"))}
    tensors |= {f"blk.0.ffn_{name}_exps.weight": (one.reshape(3, 64, -1), "Q8_0") for name, one in experts.items()}
    down = random_blocks("Q8_0", (3 * 256, 64), seed=5)
    tensors["blk.0.ffn_down_exps.weight"] = (down.reshape(3, 256, -1), "Q8_0")
    tensors["blk.0.ffn_gate_inp.weight"] = np.ones((3, 256), np.float32)
    tensors |= {f"blk.0.attn_{name}_norm.weight": np.ones(64, np.float32) for name in "qk"}
    sizes = SIZES | {".expert_count": 3, ".expert_used_count": 2, ".expert_feed_forward_length": 64}
    source = source_of(write_gguf(tmp_path / "a.gguf", "qwen3moe", metadata=sizes, tensors=tensors))

    def plain(rows: Any, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.from_numpy(gguf.quants.dequantize(rows, gguf.GGMLQuantizationType.Q8_0)).view(shape)

    gate, up = (plain(one, (3, 64, 256)) for one in experts.values())
    assert torch.equal(source.tensor("model.layers.0.mlp.experts.gate_up_proj"), torch.cat((gate, up), 1))
    assert torch.equal(source.tensor("model.layers.0.mlp.experts.down_proj"), plain(down, (3, 256, 64)))
    assert source.shape("model.layers.0.mlp.experts.gate_up_proj") == (3, 128, 256)


def test_a_kind_that_is_not_read_is_named_with_those_that_are(tmp_path: Path) -> None:
    changed = {"blk.0.ffn_up.weight": (np.zeros((256, 66), np.uint8), "IQ2_XXS")}
    path = write_gguf(tmp_path / "a.gguf", "llama", metadata=SIZES, tensors=tensors_of(**changed))
    with pytest.raises(
        ModelLoadError, match=r"blk\.0\.ffn_up\.weight is stored as IQ2_XXS, which is not read"
    ) as caught:
        source_of(path)
    assert "Q4_K, Q5_K, Q6_K" in str(caught.value.hint)


def test_a_tensor_that_the_model_has_no_place_for_is_named(tmp_path: Path) -> None:
    tensors = tensors_of() | {"blk.0.attn_q.bias": np.zeros(256, np.float32)}
    path = write_gguf(tmp_path / "a.gguf", "llama", metadata=SIZES, tensors=tensors)
    with pytest.raises(ModelLoadError, match=r"no place for 1 of its tensors, blk\.0\.attn_q\.bias for one"):
        source_of(path)


def test_the_package_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_models.save_gguf(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "gguf" else name)
    with pytest.raises(ModelLoadError, match="needs the package gguf, which is not installed") as caught:
        source_of(path)
    assert caught.value.hint == "pip install 'trencadis[gguf]'"
