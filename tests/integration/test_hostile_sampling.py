"""Samplers, acceptance rules and logits processors that misbehave in whole engines: others' texts are right, and errors name the part."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.backends import tiny_models
from support.devices import DEVICE, ON_CUDA
from support.strategies.hostile_sampling import (
    VICTIM,
    HostileDistributions,
    HostileProcessor,
    HostileRule,
    HostileSampler,
)
from support.strategies.unsafe_parts import Remembering
from trencadis.engine.build import build_engine
from trencadis.engine.engine import Engine
from trencadis.errors import CapabilityError
from trencadis.records import FinishedSequence, Request, SamplingParams
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
SAMPLER = {"sampling.name": "support.strategies.hostile_sampling:HostileSampler"}
PROCESSOR = {"sampling.standard.processors": ["support.strategies.hostile_sampling:HostileProcessor"]}
DRAFTED = {"speculation.name": "support.strategies.unsafe_parts:Remembering"}
RULE = {**DRAFTED, "acceptance.name": "support.strategies.hostile_sampling:HostileRule"}
DISTRIBUTIONS = {**DRAFTED, "acceptance.name": "support.strategies.hostile_sampling:HostileDistributions"}
PROMPTS = {
    "three": tiny_models.prompt(3, seed=3),
    "victim": [VICTIM, *tiny_models.prompt(5, seed=5)],
    "nine": tiny_models.prompt(9, seed=9),
}
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def _good_again() -> Iterator[None]:
    Remembering.asked.clear()
    yield
    Remembering.asked.clear()
    HostileSampler.mode = HostileRule.mode = HostileDistributions.last_mode = HostileProcessor.mode = ""


def make(model: Path, setup: dict[str, Any]) -> Engine:
    resolved, registry = load_with_plugins(environ={}, overrides={**BASE, "model.path": str(model), **setup})
    engine = build_engine(resolved.config, registry=registry)
    assert isinstance(engine, Engine)
    return engine


def add_all(engine: Engine, suffix: str = "", *, repeats: bool = False, **special: Any) -> None:
    """Add every prompt; ``special`` are parameters of the victim's, ``repeats`` lets every text repeat its last tokens."""
    for name, prompt in PROMPTS.items():
        own = special if name == "victim" else {}
        shared: dict[str, Any] = {"repetition_penalty": 0.5} if repeats else {}
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0, **shared, **own)
        engine.add(Request(request_id=name + suffix, prompt_token_ids=tuple(prompt), params=params))


def drained(engine: Engine) -> dict[str, FinishedSequence]:
    ends = {}
    while engine.has_work:
        ends |= {end.request_id: end for end in engine.step().finished}
    return ends


def texts(ends: dict[str, FinishedSequence]) -> dict[str, list[int]]:
    return {name: end.token_ids.tolist() for name, end in ends.items() if not end.error}


def undisturbed(model: Path, **options: Any) -> dict[str, list[int]]:
    engine = make(model, {})
    add_all(engine, **options)
    found = texts(drained(engine))
    engine.close()
    assert len(found) == 3
    return found


@pytest.fixture(scope="module")
def plain(model: Path) -> dict[str, list[int]]:
    return undisturbed(model)


@pytest.fixture(scope="module")
def repeated(model: Path) -> dict[str, list[int]]:
    """Texts of which some drafts are right."""
    return undisturbed(model, repeats=True)


def without_victim(found: dict[str, list[int]]) -> dict[str, list[int]]:
    return {name: text for name, text in found.items() if name != "victim"}


# -------------------------------------------------------------------------------------------------- samplers


@pytest.mark.parametrize("mode", HostileSampler.MODES)
def test_what_a_sampler_does_wrong_for_one_sequence_ends_that_one_with_its_name(
    model: Path, plain: dict[str, list[int]], mode: str
) -> None:
    engine = make(model, SAMPLER)
    HostileSampler.mode = mode
    add_all(engine)
    ends = drained(engine)
    assert without_victim(texts(ends)) == without_victim(plain)
    if mode == HostileSampler.HARMLESS:
        assert texts(ends) == plain or "victim" in texts(ends)
    else:
        assert "support.strategies.hostile_sampling:HostileSampler" in ends["victim"].error
    assert engine.totals.num_failed_steps == 0
    HostileSampler.mode = ""
    add_all(engine, " again")
    assert texts(drained(engine)) == {f"{name} again": text for name, text in plain.items()}
    engine.close()


@pytest.mark.parametrize("mode", HostileSampler.MODES)
def test_a_fallback_takes_the_place_of_a_sampler_that_errs(
    model: Path, plain: dict[str, list[int]], mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make(model, {**SAMPLER, "sampling.fallback": "greedy"})
    HostileSampler.mode = mode
    add_all(engine)
    with caplog.at_level(logging.ERROR):
        ends = drained(engine)
    if ON_CUDA and mode in ("negative", "beyond the vocabulary", "2^40"):
        # Seen once the step is done, which the fallback has not sampled then.
        assert "it chose token" in ends["victim"].error
    elif mode != HostileSampler.HARMLESS:
        assert texts(ends) == plain
        assert "support.strategies.hostile_sampling:HostileSampler" in caplog.text
        assert "its fallback takes over" in caplog.text
    assert without_victim(texts(ends)) == without_victim(plain)
    engine.close()


def test_a_sequence_whose_parameters_the_fallback_does_not_honour_ends_and_says_so(
    model: Path, plain: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostileSampler, "honours", frozenset({"greedy", "logprobs", "logit_bias"}))
    engine = make(model, {**SAMPLER, "sampling.fallback": "greedy"})
    HostileSampler.mode = "raises"
    add_all(engine, logit_bias={3: 1.0})
    ends = drained(engine)
    assert "logit_bias" in ends["victim"].error
    assert texts(ends) == without_victim(plain)
    engine.close()


def test_a_sampler_that_errs_for_all_ends_requests_and_not_the_engine(model: Path, plain: dict[str, list[int]]) -> None:
    engine = make(model, SAMPLER)
    HostileSampler.mode = "raises"
    engine.add(
        Request(
            request_id="v",
            prompt_token_ids=tuple(PROMPTS["victim"]),
            params=SamplingParams(max_tokens=2, temperature=0),
        )
    )
    assert "KeyError" in drained(engine)["v"].error
    HostileSampler.mode = ""
    add_all(engine)
    assert texts(drained(engine)) == plain
    engine.close()


# ----------------------------------------------------------------------------------------------------- rules


@pytest.mark.parametrize(
    ("setup", "fallback"),
    [(RULE, ""), (RULE, "token"), (DISTRIBUTIONS, "match")],
    ids=["tokens", "tokens then distributions", "distributions then tokens"],
)
@pytest.mark.parametrize("mode", HostileRule.MODES)
def test_a_rule_that_errs_changes_no_text_and_is_named(
    model: Path, repeated: dict[str, list[int]], mode: str, setup: Any, fallback: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make(model, {**setup, "acceptance.fallback": fallback})
    HostileRule.mode = mode
    add_all(engine, repeats=True)
    with caplog.at_level(logging.ERROR):
        ends = drained(engine)
    assert texts(ends) == repeated
    assert Remembering.asked
    if not mode.startswith("writes"):
        assert "acceptance component" in caplog.text
        assert (
            f"support.strategies.hostile_sampling:{'HostileDistributions' if setup is DISTRIBUTIONS else 'HostileRule'}"
            in caplog.text
        )
        assert ("its fallback takes over" if fallback else "No draft stands from now on") in caplog.text
        assert engine.totals.num_drafters_quarantined == (not fallback)
    engine.close()


@pytest.mark.parametrize("mode", HostileDistributions.LAST_MODES)
def test_a_distribution_of_the_last_token_that_is_none_changes_no_text_and_is_named(
    model: Path, repeated: dict[str, list[int]], mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make(model, DISTRIBUTIONS)
    HostileDistributions.last_mode = mode
    add_all(engine, repeats=True)
    with caplog.at_level(logging.ERROR):
        assert texts(drained(engine)) == repeated
    assert "support.strategies.hostile_sampling:HostileDistributions" in caplog.text
    engine.close()


def test_rules_that_do_right_stay(
    model: Path, repeated: dict[str, list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    for setup in (RULE, DISTRIBUTIONS):
        engine = make(model, setup)
        add_all(engine, repeats=True)
        with caplog.at_level(logging.ERROR):
            assert texts(drained(engine)) == repeated
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
        engine.close()


def test_a_fallback_rule_that_reads_distributions_is_refused_beside_a_sampler_that_gives_none(model: Path) -> None:
    with pytest.raises(
        CapabilityError,
        match=r"\[acceptance\] fallback = 'support.strategies.hostile_sampling:HostileDistributions'.*does not provide them",
    ):
        make(
            model,
            {**SAMPLER, **DRAFTED, "acceptance.fallback": "support.strategies.hostile_sampling:HostileDistributions"},
        )


# ------------------------------------------------------------------------------------------------ processors


@pytest.mark.parametrize("drafted", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("mode", HostileProcessor.MODES)
def test_what_a_processor_does_wrong_ends_the_sequence_that_asked_for_it_with_its_name(
    model: Path, plain: dict[str, list[int]], mode: str, drafted: bool
) -> None:
    engine = make(model, {**PROCESSOR, **(DRAFTED if drafted else {})})
    HostileProcessor.mode = mode
    add_all(engine, logits_processors={"hostile": {}})
    ends = drained(engine)
    assert without_victim(texts(ends)) == without_victim(plain)
    if mode == HostileProcessor.HARMLESS:
        assert ends["victim"].token_ids.tolist() == [0] * NUM_TOKENS
    else:
        assert 'logits processor "support.strategies.hostile_sampling:HostileProcessor"' in ends["victim"].error
    assert engine.totals.num_failed_steps == 0
    HostileProcessor.mode = ""
    add_all(engine, " again", logits_processors={"hostile": {}})
    assert texts(drained(engine)) == {f"{name} again": text for name, text in plain.items()}
    engine.close()


def test_parameters_that_leave_no_token_end_their_request_and_cost_no_other_a_step(
    model: Path, plain: dict[str, list[int]]
) -> None:
    engine = make(model, {})
    add_all(engine, allowed_token_ids=(4,), bad_words_ids=((4,),))
    num_steps, ends = 0, {}
    while engine.has_work:
        num_steps += 1
        ends |= {end.request_id: end for end in engine.step().finished}
    assert "allowed_token_ids and bad_words" in ends["victim"].error
    assert texts(ends) == without_victim(plain)
    assert engine.totals.num_failed_steps == engine.totals.num_recomputed_tokens == 0
    assert num_steps <= NUM_TOKENS + 2
    engine.close()
