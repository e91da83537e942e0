"""Acceptance rules in whole engines: the text of greedy requests, of seeded ones, and of those that take no drafts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.backends import tiny_models
from support.devices import DEVICE
from support.strategies.unsafe_parts import Remembering
from trencadis.engine.build import build_engine
from trencadis.errors import CapabilityError
from trencadis.records import Request, SamplingParams
from trencadis.registry.startup import load_with_plugins

BASE = {
    "engine.max_num_seqs": 4,
    "engine.max_num_batched_tokens": 64,
    "engine.warmup": False,
    "cache.block_size": 8,
    "cache.num_blocks": 64,
    "model.max_model_len": 96,
    "model.dtype": "float32",
    "backend.torch.device": DEVICE,
    "observer.names": [],
}
DRAFTED = {"speculation.name": "support.strategies.unsafe_parts:Remembering", "draft_length.name": "fixed"}
PROMPTS = {f"request-{n}": tiny_models.prompt(n, seed=n) for n in (3, 9, 17)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def _nobody_asked() -> Iterator[None]:
    Remembering.asked.clear()
    yield
    Remembering.asked.clear()


def texts(model: Path, setup: dict[str, Any], params: dict[str, SamplingParams]) -> tuple[dict[str, list[int]], int]:
    """Return every request's tokens, and how many steps they took."""
    resolved, registry = load_with_plugins(environ={}, overrides={**BASE, "model.path": str(model), **setup})
    engine = build_engine(resolved.config, registry=registry)
    found: dict[str, list[int]] = {}
    num_steps = 0
    try:
        for request_id, prompt in PROMPTS.items():
            engine.add(Request(request_id=request_id, prompt_token_ids=prompt, params=params[request_id]))
        while engine.has_work:
            num_steps += 1
            for end in engine.step().finished:
                assert not end.error
                found[end.request_id] = end.token_ids.tolist()
    finally:
        engine.close()
    return found, num_steps


def every(**params: Any) -> dict[str, SamplingParams]:
    return {request_id: SamplingParams(max_tokens=16, ignore_eos=True, **params) for request_id in PROMPTS}


@pytest.mark.parametrize("rule", ["match", "token", "block", "tree", "typical"])
def test_greedy_text_is_that_of_no_speculation(model: Path, rule: str) -> None:
    params = every(temperature=0.0, repetition_penalty=0.5)
    plain, num_plain = texts(model, {}, params)
    drafted, num_drafted = texts(model, {**DRAFTED, "acceptance.name": rule}, params)
    assert drafted == plain
    assert Remembering.asked == set(PROMPTS)
    assert num_drafted < num_plain, "no draft was accepted: the test shows nothing"


def test_seeded_text_with_match_is_that_of_no_speculation(model: Path) -> None:
    params = every(temperature=1.0, seed=11, repetition_penalty=0.2, frequency_penalty=0.3, top_p=0.9)
    plain, num_plain = texts(model, {}, params)
    drafted, num_drafted = texts(model, DRAFTED, params)
    assert drafted == plain
    assert num_drafted < num_plain, "no draft was accepted: the test shows nothing"


def test_a_request_whose_processors_take_no_drafts_is_not_drafted_for(model: Path) -> None:
    setup = {
        "sampling.standard.processors": ["support.strategies.unsafe_parts:CountsCalls"],
        "engine.async_scheduling": False,
    }
    params = every(temperature=0.0)
    params["request-9"] = SamplingParams(
        max_tokens=16, ignore_eos=True, temperature=0.0, logits_processors={"counts_calls": {}}
    )
    plain, _ = texts(model, setup, params)
    drafted, _ = texts(model, {**setup, **DRAFTED}, params)
    assert drafted == plain
    assert Remembering.asked == {"request-3", "request-17"}


def test_synthetic_acceptance_makes_steps_as_long_as_it_is_told(model: Path) -> None:
    setup = {**DRAFTED, "acceptance.name": "synthetic", "acceptance.synthetic.mean_tokens": 4.0}
    found, num_steps = texts(model, setup, every(temperature=0.0))
    assert {len(tokens) for tokens in found.values()} == {16}
    assert num_steps <= 7  # a prefill, then four tokens a step


def test_a_rule_that_reads_distributions_is_refused_beside_a_sampler_that_gives_none(model: Path) -> None:
    setup = {**DRAFTED, "acceptance.name": "block", "sampling.name": "trencadis_testing.backend:ArgmaxSampler"}
    with pytest.raises(CapabilityError, match=r"sampling\.distributions"):
        texts(model, setup, every())
