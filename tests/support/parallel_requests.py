"""Requests of many kinds for the demo model, to compare what engines make of them however their ranks are laid out."""

from __future__ import annotations

import math
from typing import Any

from trencadis import LLM, SamplingParams

PROMPTS = [
    "Alice was beginning to get very tired of sitting by her sister on the bank",
    "The rabbit-hole went straight on like a tunnel for some way",
    "Down, down, down. Would the fall never come to an end?",
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do",
    "Curiouser",
]

PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "seed": 7, "top_p": 0.95},
    "unseeded": {"temperature": 0.7, "top_k": 20},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "logit_bias": {17: 2.0}},
    "two": {"temperature": 0.8, "seed": 3, "n": 2},
    "logprobs": {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
    "choice": {"temperature": 0.0, "structured": {"kind": "choice", "choices": ["yes", "no", "perhaps"]}},
}


def answers(max_tokens: int = 16, **overrides: Any) -> dict[str, Any]:
    """Return texts and, rounded, the log-probabilities of all kinds of requests served together; ``__`` in a name stands for a dot."""
    config = {
        "cache.num_blocks": 96,
        "model.dtype": "float32",
        "engine.max_num_seqs": 8,
        "engine.max_num_batched_tokens": 64,
        "observer.names": [],
        **{name.replace("__", "."): value for name, value in overrides.items()},
    }
    with LLM(**config) as llm:
        kinds = [(name, prompt) for name in PARAMS for prompt in PROMPTS]
        params = [SamplingParams(max_tokens=max_tokens, ignore_eos=True, **PARAMS[name]) for name, _ in kinds]
        outputs = llm.generate([prompt for _, prompt in kinds], params)
    return {
        f"{name}: {prompt}": [
            (one.token_ids, one.finish_reason, _rounded(one.logprobs), _rounded(output.prompt_logprobs))
            for one in output.outputs
        ]
        for (name, prompt), output in zip(kinds, outputs, strict=True)
    }


def _rounded(entries: Any) -> Any:
    return None if entries is None else [(one.token_id, math.floor(one.logprob * 100 + 0.5)) for one in entries]
