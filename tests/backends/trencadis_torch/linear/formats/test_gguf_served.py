"""Files of a mix of kinds as the backend serves them, against transformers with the dequantised weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.backends import tiny_models
from support.gguf_writing import write_gguf
from trencadis import LLM, SamplingParams

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
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


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


def engine(path: Path, **backend: Any) -> LLM:
    return LLM({"path": str(path), "tokenizer": "none"}, backend={"torch": {"num_threads": 1, **backend}})


def prompt_logprobs(path: Path, **backend: Any) -> torch.Tensor:
    """Return the log-probability of each token of the prompt but the first."""
    with engine(path, **backend) as llm:
        found = llm.generate([PROMPT], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))[
            0
        ].prompt_logprobs
    assert found is not None
    assert [one.token_id for one in found] == PROMPT[1:]
    return torch.tensor([one.logprob for one in found])


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
    with engine(path) as llm:
        assert 77 not in llm.model.eos_token_ids
