"""Configurations of metadata: against transformers' own reader, and where that leaves out what a file says."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig

from support.gguf_writing import write_gguf
from trencadis.errors import ModelLoadError
from trencadis.gguf_file import read_gguf
from trencadis_torch.loading.gguf_config import gguf_config

pytest.importorskip("gguf")

SIZES = {
    ".context_length": 64,
    ".embedding_length": 32,
    ".block_count": 2,
    ".feed_forward_length": 48,
    ".attention.head_count": 4,
    ".attention.head_count_kv": 2,
    ".attention.layer_norm_rms_epsilon": 2e-5,
    ".rope.freq_base": 5000.0,
    "tokenizer.ggml.tokens": ["a", "b", "c"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def config_of(directory: Path, architecture: str, *, tensors: dict[str, Any] | None = None, **more: Any) -> Any:
    metadata = SIZES | {name.replace("__", "."): value for name, value in more.items()}
    return gguf_config(
        read_gguf(write_gguf(directory / "a.gguf", architecture, metadata=metadata, tensors=tensors or {}))
    )


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma2", "gemma3", "phi3", "qwen3moe", "stablelm"])
def test_a_configuration_is_that_of_transformers(tmp_path: Path, architecture: str) -> None:
    found = config_of(tmp_path, architecture).to_dict()
    expected = AutoConfig.from_pretrained(tmp_path, gguf_file="a.gguf").to_dict()
    named = ("_name_or_path", "_model_name_or_path")
    assert {key: found[key] for key in found if key not in named} == {
        key: expected[key] for key in expected if key not in named
    }


def test_an_output_projection_of_its_own_is_seen(tmp_path: Path) -> None:
    assert config_of(tmp_path, "llama").tie_word_embeddings
    tensors = {"output.weight": np.zeros((3, 32), np.float32)}
    assert not config_of(tmp_path, "llama", tensors=tensors).tie_word_embeddings


def test_other_ends_of_turn_are_ends_as_well(tmp_path: Path) -> None:
    assert config_of(tmp_path, "llama", tokenizer__ggml__eot_token_id=0).eos_token_id == [2, 0]
    assert config_of(tmp_path, "llama", tokenizer__ggml__eot_token_id=2).eos_token_id == 2


def test_widths_that_transformers_leaves_out_are_read(tmp_path: Path) -> None:
    assert config_of(tmp_path, "qwen3", __attention__key_length=24).head_dim == 24
    assert config_of(tmp_path, "qwen3moe", __expert_feed_forward_length=40).moe_intermediate_size == 40
    assert config_of(tmp_path, "gemma2", __final_logit_softcapping=7.0).final_logit_softcapping == 7.0


def test_attention_of_the_largest_gemma_is_scaled_by_another_width(tmp_path: Path) -> None:
    more = {"__attention__key_length": 16}
    assert config_of(tmp_path, "gemma3", **more).query_pre_attn_scalar == 16
    assert config_of(tmp_path, "gemma3", **more, __block_count=62).query_pre_attn_scalar == 32 // 4


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scaled_rotary_embeddings_are_scaled(tmp_path: Path, kind: str) -> None:
    more = {
        "__rope__scaling__type": kind,
        "__rope__scaling__factor": 8.0,
        "__rope__scaling__original_context_length": 16,
    }
    found = config_of(tmp_path, "llama", **more).rope_parameters
    assert (found["rope_type"], found["factor"], found["original_max_position_embeddings"]) == (kind, 8.0, 16)
    assert found["rope_theta"] == 5000.0


def test_gemmas_rotary_embeddings_are_scaled_in_full_layers_alone(tmp_path: Path) -> None:
    found = config_of(tmp_path, "gemma3", __rope__scaling__type="linear", __rope__scaling__factor=8.0).rope_parameters
    assert (found["full_attention"]["rope_type"], found["full_attention"]["factor"]) == ("linear", 8.0)
    assert found["sliding_attention"]["rope_type"] == "default"


def quotients(*, factor: float, width: int = 64, base: float = 5000.0) -> Any:
    """Return what llama.cpp's converter writes for Llama 3's scaling.

    Source: ``convert_hf_to_gguf.py`` of ggml-org/llama.cpp.
    """
    found = []
    for frequency in (1 / base ** (np.arange(0, width, 2) / width)).tolist():
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            found.append(1.0)
        elif wavelength > 8192:
            found.append(factor)
        else:
            share = (8192 / wavelength - 1) / (4 - 1)
            found.append(1 / ((1 - share) / factor + share))
    return np.array(found, np.float32)


def test_quotients_of_llama_3_are_its_scaling(tmp_path: Path) -> None:
    tensors = {"rope_freqs.weight": quotients(factor=32.0)}
    found = config_of(tmp_path, "llama", tensors=tensors, __rope__dimension_count=64).rope_parameters
    assert found["rope_type"] == "llama3"
    assert {key: found[key] for key in ("factor", "low_freq_factor", "high_freq_factor")} == {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    assert found["original_max_position_embeddings"] == 8192


def test_quotients_of_another_scaling_are_refused(tmp_path: Path) -> None:
    tensors = {"rope_freqs.weight": quotients(factor=32.0)[::-1]}
    with pytest.raises(ModelLoadError, match=r"rope_freqs\.weight scales the rotary embeddings in a way"):
        config_of(tmp_path, "llama", tensors=tensors)


def test_an_architecture_without_a_mapping_is_refused_with_those_that_have_one(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no mapping for \.gguf files of the architecture 'zebra'") as caught:
        config_of(tmp_path, "zebra")
    assert "gemma3, " in str(caught.value.hint)
