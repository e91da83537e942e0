"""Each feature that the table of layouts says works among ranks: two ranks in processes, next to one in the engine's process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from support import parallel_requests as requests
from support.backends.mixtures import save_mixture
from support.parallel_requests import PARAMS, PROMPTS
from trencadis import LLM, SamplingParams
from trencadis.records import BeamSearchParams

ONE_PREFIX = [PROMPTS[0], PROMPTS[1], PROMPTS[3]]
"""The last begins as the first does: its blocks are found in the cache."""

SMALL = {"cache.num_blocks": 96, "engine.max_num_seqs": 6, "engine.max_num_batched_tokens": 64, "observer.names": []}
TWO_RANKS = {"executor.name": "processes", "parallel.tensor": 2}

PADDED = "padded, blocks moved and swapped, engine in a process, other attention, policies and drafts"
DRAWN = "drafts drawn from distributions"
EXACT: dict[str, tuple[dict[str, Any], bool]] = {
    PADDED: (
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
    DRAWN: ({"speculation.name": "draft_model", "acceptance.name": "token"}, False),
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


@pytest.fixture(scope="module")
def one_rank() -> Callable[..., tuple[dict[str, Any], np.ndarray]]:
    """Gives the answers of one rank; those without special settings are made once for each model."""
    plain = functools.cache(lambda model: answers(**({"model.path": model} if model else {})))
    return lambda model, config: plain(model) if config is None else answers(**config)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_mixture("mixtral", tmp_path_factory.mktemp("mixture")))


OF_A_RANK: dict[str, dict[str, Any]] = {
    PADDED: {"cache.num_blocks": 8, "model.max_model_len": 96, "speculation.name": "suffix"},
    # With a small budget which drafts are left out depends on the ranks, and so what is drawn.
    DRAWN: {"speculation.draft_model.model": "demo", "engine.max_num_batched_tokens": 2048},
}
"""Other sizes where each rank has sequences of its own."""


@pytest.mark.nightly  # without these features: test_tensor.py, test_data_attention.py
@pytest.mark.parametrize("own_sequences", [False, True])
@pytest.mark.parametrize("setup", EXACT)
def test_two_ranks_say_what_one_does(setup: str, own_sequences: bool, one_rank: Any, mixture: str) -> None:
    (config, is_lossless), layout, model = EXACT[setup], TWO_RANKS, {}
    if own_sequences:
        config, model = {**config, **OF_A_RANK.get(setup, {})}, {"model.path": mixture}
        layout = {**TWO_RANKS, "parallel.expert": 2, "parallel.attention": "data"}
    expected, scores = one_rank(model.get("model.path", ""), None if is_lossless else {**model, **config})
    found, found_scores = answers(**layout, **model, **config)
    np.testing.assert_allclose(found["vectors"], expected["vectors"], atol=1e-5)
    np.testing.assert_allclose(found_scores, scores, atol=1e-4)
    assert found["cached"] == config.get("cache.prefix_caching", True)
    for name in expected.keys() - {"vectors", "cached"}:
        assert found[name] == expected[name], name


@pytest.mark.nightly
def test_numbers_in_8_bits_are_as_near_on_two_ranks_as_on_one(one_rank: Any) -> None:
    """Of a share's inputs other ones are the largest, so that they are rounded otherwise: the error is of the same size."""
    config = {"backend.torch.quantization": "int8", "backend.torch.kv_dtype": "int8"}
    _, scores = one_rank("", None)
    (_, alone), (_, together) = answers(**config), answers(**TWO_RANKS, **config)
    error, expected = (float(np.abs(one - scores).mean()) for one in (together, alone))
    assert 0 < error <= 1.5 * expected


@pytest.mark.nightly  # with measured loads: test_experts.py
def test_whole_experts_on_two_ranks_say_what_one_rank_does(mixture: str) -> None:
    config = {"model.path": mixture, "cache.num_blocks": 12, "model.max_model_len": 96, "engine.preemption": "swap"}
    config |= {"speculation.name": "ngram"}
    assert requests.answers(8, **config, **TWO_RANKS, **{"parallel.expert": 2}) == requests.answers(8, **config)
