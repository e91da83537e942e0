"""Mixtures of experts in .gguf files: held as the file has them, in one call, against transformers with the dequantised weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.backends.gguf_mixtures import FORMS, save_gguf_mixture
from support.backends.served import held, prompt_logprobs
from trencadis.gguf_file import read_gguf
from trencadis_torch.linear.formats.gguf import GgufSource
from trencadis_torch.linear.native import native
from trencadis_torch.loading.gguf_config import gguf_config

pytest.importorskip("gguf")
pytestmark = pytest.mark.skipif(native() is None, reason="there is no C++ compiler on this machine")


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
