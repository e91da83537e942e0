"""Each feature that the table of layouts says works among ranks: two ranks in processes, next to one in the engine's process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support.backends.families import save_family
from support.backends.mixtures import save_mixture
from support.parallel_requests import PARAMS, PROMPTS
from trencadis import LLM, SamplingParams
from trencadis.records import BeamSearchParams

ONE_PREFIX = [PROMPTS[0], PROMPTS[1], PROMPTS[3]]
"""The last begins as the first does: its blocks are found in the cache."""

SMALL = {"cache.num_blocks": 96, "engine.max_num_seqs": 6, "engine.max_num_batched_tokens": 64, "observer.names": []}
TWO_RANKS = {"executor.name": "processes", "parallel.tensor": 2}

EXACT: dict[str, tuple[dict[str, Any], bool]] = {
    "padded, blocks moved and swapped, engine in a process, other attention, policies and drafts": (
        {
            "backend.torch.layout": "padded",
            "backend.torch.attention": "sdpa",
            "defragmenter.enabled": "on",
            "engine.placement": "process",
            "engine.preemption": "swap",
            "cache.num_blocks": 12,
            "scheduling.name": "shortest_first",
            "eviction.name": "lfu",
            "observer.names": ["log"],
            "speculation.name": "parallel_draft",
        },
        True,
    ),
    "drafts in trees, nothing cached, no step ahead": (
        {
            "speculation.name": "suffix",
            "speculation.suffix.tree": True,
            "cache.prefix_caching": False,
            "engine.async_scheduling": False,
        },
        True,
    ),
    "drafts drawn from distributions": ({"speculation.name": "draft_model", "acceptance.name": "token"}, False),
}
"""Settings, and whether one rank without them says the same: a rule with distributions has a say in what is drawn."""


def answers(**config: Any) -> tuple[dict[str, Any], np.ndarray]:
    """Return what all kinds of requests bring, and log-probabilities of prompts."""
    with LLM(**{**SMALL, **config}) as llm:
        kinds = [(name, prompt) for prompt in ONE_PREFIX for name in PARAMS]
        params = [SamplingParams(max_tokens=8, ignore_eos=True, **PARAMS[name]) for name, _ in kinds]
        outputs = llm.generate([prompt for _, prompt in kinds], params)
        found: dict[str, Any] = {
            f"{name}: {prompt}": [one.token_ids for one in output.outputs]
            for (name, prompt), output in zip(kinds, outputs, strict=True)
        }
        found["cached"] = outputs[2 * len(PARAMS)].num_cached_tokens > 0
        beams = llm.beam_search(ONE_PREFIX[:2], BeamSearchParams(beam_width=2, max_tokens=4))
        found["beams"] = [[one.token_ids for one in output.outputs] for output in beams]
        scores = [
            [one.logprob for one in output.prompt_logprobs]
            for (name, _), output in zip(kinds, outputs, strict=True)
            if name == "logprobs"
        ]
        found["vectors"] = np.stack([one.vector for one in llm.embed(ONE_PREFIX[:2])])
    return found, np.concatenate(scores)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    np.testing.assert_allclose(found["vectors"], expected["vectors"], atol=1e-5)
    for name in expected.keys() - {"vectors", "cached"}:
        assert found[name] == expected[name], name


@pytest.fixture(scope="module")
def one_rank() -> tuple[dict[str, Any], np.ndarray]:
    return answers()


@pytest.mark.nightly  # without these features: test_tensor.py; ranks as threads: tests/integration/test_ranks.py
@pytest.mark.parametrize("setup", EXACT)
def test_two_ranks_say_what_one_does(setup, one_rank):
    config, is_lossless = EXACT[setup]
    expected, scores = one_rank if is_lossless else answers(**config)
    found, found_scores = answers(**TWO_RANKS, **config)
    assert_same(found, expected)
    np.testing.assert_allclose(found_scores, scores, atol=1e-4)
    assert found["cached"] == config.get("cache.prefix_caching", True)


@pytest.mark.nightly
def test_numbers_in_8_bits_are_as_near_on_two_ranks_as_on_one(one_rank):
    """Of a share's inputs other ones are the largest, so that they are rounded otherwise: the error is of the same size."""
    config = {"backend.torch.quantization": "int8", "backend.torch.kv_dtype": "int8"}
    _, scores = one_rank
    (_, alone), (_, together) = answers(**config), answers(**TWO_RANKS, **config)
    error, expected = (float(np.abs(one - scores).mean()) for one in (together, alone))
    assert 0 < error <= 1.5 * expected


OWN_SEQUENCES: dict[str, dict[str, Any]] = {
    "padded, blocks moved and swapped, engine in a process, other attention, policies and drafts": {
        **EXACT["padded, blocks moved and swapped, engine in a process, other attention, policies and drafts"][0],
        "cache.num_blocks": 8,
        "model.max_model_len": 96,
        "speculation.name": "suffix",
    },
    "drafts in trees, nothing cached, no step ahead": EXACT["drafts in trees, nothing cached, no step ahead"][0],
    # With a small budget which drafts are left out depends on the ranks, and so what is drawn.
    "drafts drawn from distributions": {
        **EXACT["drafts drawn from distributions"][0],
        "speculation.draft_model.model": "demo",
        "engine.max_num_batched_tokens": 2048,
    },
}


@pytest.mark.nightly
@pytest.mark.parametrize("setup", OWN_SEQUENCES)
def test_two_ranks_with_sequences_of_their_own_say_what_one_does(tmp_path, setup):
    config = {"model.path": str(save_mixture("mixtral", tmp_path)), **OWN_SEQUENCES[setup]}
    is_lossless = "acceptance.name" not in config
    expected, scores = answers(**{"model.path": config["model.path"]} if is_lossless else config)
    found, found_scores = answers(**TWO_RANKS, **{"parallel.expert": 2, "parallel.attention": "data"}, **config)
    assert_same(found, expected)
    np.testing.assert_allclose(found_scores, scores, atol=1e-4)
    assert found["cached"] == config.get("cache.prefix_caching", True)


@pytest.mark.nightly  # with measured loads: test_experts.py
def test_whole_experts_on_two_ranks_say_what_one_rank_does(tmp_path):
    path = save_family("mixtral", tmp_path)
    config = {
        **SMALL,
        "model.path": str(path),
        "model.tokenizer": "none",
        "model.dtype": "float32",
        "cache.num_blocks": 12,
        "engine.preemption": "swap",
        "speculation.name": "ngram",
    }
    prompts = [[3, 9, 27, 5, 3, 9, 27], list(range(40))]
    kinds = [
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.9, "seed": 3, "n": 2},
        {"temperature": 0.0, "repetition_penalty": 1.2},
    ]
    params = [SamplingParams(max_tokens=12, ignore_eos=True, **kind) for kind in kinds]
    found = []
    for layout in ({}, {**TWO_RANKS, "parallel.expert": 2}):
        with LLM(**config, **layout) as llm:
            outputs = [llm.generate(prompts, one) for one in params]
        found.append([[one.token_ids for one in output.outputs] for each in outputs for output in each])
    assert found[0] == found[1]
