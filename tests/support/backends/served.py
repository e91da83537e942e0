"""A tiny checkpoint as the engine serves it: its greedy tokens, log-probabilities of its prompt, and what the log says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.backends import tiny_models
from trencadis import LLM, SamplingParams


def _engine(path: Path, **backend: Any) -> LLM:
    return LLM({"path": str(path), "tokenizer": "none"}, backend={"torch": {"num_threads": 1, **backend}})


def held(path: Path, caplog: pytest.LogCaptureFixture, **backend: Any) -> tuple[list[int], str]:
    """Return greedy tokens of a checkpoint, and what the log says of it."""
    caplog.clear()
    with caplog.at_level("INFO", "trencadis.torch"), _engine(path, **backend) as llm:
        asked = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        return list(llm.generate([tiny_models.prompt(20)], asked)[0].outputs[0].token_ids), caplog.text


def prompt_logprobs(path: Path, **backend: Any) -> torch.Tensor:
    """Return the log-probability of each token of a prompt but the first."""
    asked = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    with _engine(path, **backend) as llm:
        found = llm.generate([tiny_models.prompt(20)], asked)[0].prompt_logprobs
    assert found is not None
    return torch.tensor([one.logprob for one in found])
