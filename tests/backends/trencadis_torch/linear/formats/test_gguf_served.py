"""Files of a mix of kinds as the backend serves them, against transformers with the dequantised weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.backends import tiny_models
from support.backends.gguf_mixtures import FORMS, save_gguf_mixture
from support.backends.served import held, prompt_logprobs
from support.gguf_writing import random_blocks, write_gguf
from trencadis import LLM
from trencadis.gguf_file import KINDS, read_gguf
from trencadis_torch.linear.formats import gguf_blocks
from trencadis_torch.linear.formats.gguf import GgufSource
from trencadis_torch.linear.formats.gguf_blocks import unpacked
from trencadis_torch.linear.native import native
from trencadis_torch.loading.gguf_config import gguf_config

gguf = pytest.importorskip("gguf")
SIZES = {
    ".context_length": 256,
    ".embedding_length": 64,
    ".block_count": 2,
    ".feed_forward_length": 96,
    ".attention.head_count": 4,
    ".attention.head_count_kv": 2,
    ".attention.layer_norm_rms_epsilon": 1e-5,
    ".rope.dimension_count": 16,
    ".rope.freq_base": 10000.0,
    ".vocab_size": tiny_models.VOCAB_SIZE,
}
MIX = {
    "ffn_up": "Q4_0",
    "ffn_gate": "Q4_1",
    "ffn_down": "Q5_0",
    "attn_q": "Q5_1",
    "attn_v": "BF16",
    "token_embd": "Q8_0",
}
PROMPT = tiny_models.prompt(20)


def make_file(directory: Path) -> Path:
    """Write a Llama of random weights in several kinds, its embeddings tied."""
    generator = torch.Generator().manual_seed(3)

    def blocks(name: str, rows: int, columns: int) -> tuple[Any, str]:
        kind = MIX.get(name, "Q8_0")
        values = torch.randn(rows, columns, generator=generator).mul(0.3).numpy()
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind]).view("u1"), kind

    sizes = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
    sizes |= {"ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}
    tensors: dict[str, Any] = {"token_embd.weight": blocks("token_embd", tiny_models.VOCAB_SIZE, 64)}
    tensors["output_norm.weight"] = torch.ones(64).numpy()
    for layer in range(2):
        tensors |= {f"blk.{layer}.{name}.weight": blocks(name, *shape) for name, shape in sizes.items()}
        tensors |= {f"blk.{layer}.{name}_norm.weight": torch.ones(64).numpy() for name in ("attn", "ffn")}
    return write_gguf(directory / "mix.gguf", "llama", metadata=SIZES, tensors=tensors)


def reference(directory: Path) -> Any:
    """Return the model that transformers makes of the file, which dequantises it."""
    from transformers import AutoModelForCausalLM

    pytest.importorskip("accelerate", reason="transformers reads .gguf files with the package accelerate")
    options = {"gguf_file": "mix.gguf", "attn_implementation": "eager", "dtype": torch.float32}
    return AutoModelForCausalLM.from_pretrained(directory, **options).eval()


@torch.no_grad()
def test_dequantised_weights_give_the_probabilities_of_transformers(tmp_path: Path) -> None:
    path = make_file(tmp_path)
    logits = reference(tmp_path)(torch.tensor([PROMPT]), use_cache=False).logits[0]
    expected = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    torch.testing.assert_close(prompt_logprobs(path, pack="off"), expected, atol=2e-3, rtol=0)


def test_blocks_give_nearly_the_probabilities_of_their_dequantised_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows are rounded to 8 bits; a scale or a row in the wrong place moves log-probabilities by several units."""
    path = make_file(tmp_path)
    with caplog.at_level("INFO", "trencadis.torch"):
        found = prompt_logprobs(path)
    expected = prompt_logprobs(path, pack="off")
    assert (found - expected).abs().mean() < 0.1 * (expected - expected.roll(1)).abs().mean()
    assert "GGUF, Q8_0, Q4_1, Q4_0" in caplog.text
    assert "int8 in groups of 32" in caplog.text


def test_what_lies_beside_a_file_says_nothing_of_it(tmp_path: Path) -> None:
    path = make_file(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 77}')
    with LLM({"path": str(path), "tokenizer": "none"}) as llm:
        assert 77 not in llm.model.eos_token_ids


@pytest.mark.skipif(native() is None, reason="there is no C++ compiler on this machine")
@pytest.mark.representatives(1, ci=3)
@pytest.mark.parametrize("architecture", FORMS)
def test_a_mixture_is_held_as_its_file_has_it_and_runs_in_one_call(
    architecture: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import AutoModelForCausalLM

    path, floats = save_gguf_mixture(tmp_path, architecture)
    file = read_gguf(path)
    source = GgufSource(file, gguf_config(file))
    expected = AutoModelForCausalLM.from_pretrained(floats, dtype=torch.float32).state_dict()
    assert source.names() == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(source.tensor(name), tensor), name
        if tensor.dim() == 3:
            stack = source.stack(name)
            assert stack.matrices[0].form == FORMS[architecture]
            assert all(torch.equal(stack[index], tensor[index]) for index in range(5))
    _, text = held(path, caplog)
    assert f"held as {FORMS[architecture]}" in text
    assert "runs in one call" in text
    assert "WARNING" not in text
    reference = prompt_logprobs(floats, pack="off")
    torch.testing.assert_close(prompt_logprobs(path, pack="off"), reference, atol=1e-5, rtol=0)
    # Rows are rounded to 8 bits where weights are integers.
    error = (prompt_logprobs(path) - reference).abs().mean()
    assert error < 0.1 * (reference - reference.roll(1)).abs().mean()


@pytest.mark.representatives(13)
@pytest.mark.parametrize("kind", gguf_blocks.FORMS)
def test_blocks_have_the_values_of_the_reference(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_blocks, "_AT_ONCE", 600)  # several parts, the last one smaller
    number, found = next((number, one) for number, one in KINDS.items() if one.name == kind)
    raw = random_blocks(kind, (11, 512))
    calls = list[None]()
    held = unpacked(torch.from_numpy(raw), found, lambda: calls.append(None))
    assert calls
    expected = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(number)))
    assert expected.isfinite().all()
    assert expected.std() > 0
    assert torch.equal(held.dequantised(), expected)
    assert held.bits == gguf_blocks.FORMS[kind].bits
    assert held.group == gguf_blocks.FORMS[kind].group
    assert int(held.values.max()) < 2**held.bits
