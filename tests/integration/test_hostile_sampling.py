"""Samplers, acceptance rules and logits processors in whole engines: where they misbehave others' texts are right, and errors name the part.

Texts of every rule with every drafter: ``test_speculation_matrix.py``.
"""

from __future__ import annotations

import functools
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
HERE = "support.strategies.hostile_sampling:"
SAMPLER = {"sampling.name": f"{HERE}HostileSampler"}
PROCESSOR = {"sampling.standard.processors": [f"{HERE}HostileProcessor"]}
DRAFTED = {"speculation.name": "support.strategies.unsafe_parts:Remembering"}
RULE = {**DRAFTED, "acceptance.name": f"{HERE}HostileRule"}
DISTRIBUTIONS = {**DRAFTED, "acceptance.name": f"{HERE}HostileDistributions"}
PROMPTS = {
    "three": tiny_models.prompt(3, seed=3),
    "victim": [VICTIM, *tiny_models.prompt(5, seed=5)],
    "nine": tiny_models.prompt(9, seed=9),
}
NUM_TOKENS = 12
Texts = dict[str, list[int]]


@pytest.fixture(autouse=True)
def _good_again() -> Iterator[None]:
    Remembering.asked.clear()
    yield
    Remembering.asked.clear()
    HostileSampler.mode = HostileRule.mode = HostileDistributions.last_mode = HostileProcessor.mode = ""


class House:
    """Makes engines of a tiny model.

    Attributes:
        plain: The texts of the prompts without anything special.
        repeated: The same with a penalty that lets texts repeat their tokens, so that some drafts are right.
    """

    def __init__(self, model: Path) -> None:
        self._model = model

    def open(self, setup: dict[str, Any]) -> Engine:
        resolved, registry = load_with_plugins(environ={}, overrides={**BASE, "model.path": str(self._model), **setup})
        engine = build_engine(resolved.config, registry=registry)
        assert isinstance(engine, Engine)
        return engine

    def texts(self, setup: dict[str, Any], **options: Any) -> Texts:
        """Return what an engine of its own writes."""
        engine = self.open(setup)
        found = served(engine, **options)
        engine.close()
        assert not [end.error for end in found.values() if end.error]
        return texts(found)

    @functools.cached_property
    def plain(self) -> Texts:
        return self.texts({})

    @functools.cached_property
    def repeated(self) -> Texts:
        return self.texts({}, repetition_penalty=0.5)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    return House(tiny_models.save_model("llama", tmp_path_factory.mktemp("models")))


def served(engine: Engine, special: dict[str, Any] | None = None, **shared: Any) -> dict[str, FinishedSequence]:
    """Serve every prompt; ``special`` are parameters of the victim's, ``shared`` those of all."""
    for name, prompt in PROMPTS.items():
        own = (special or {}) if name == "victim" else {}
        params = SamplingParams(**{"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0.0, **shared, **own})
        engine.add(Request(request_id=name, prompt_token_ids=tuple(prompt), params=params))
    ends = {}
    while engine.has_work:
        ends |= {end.request_id: end for end in engine.step().finished}
    return ends


def texts(ends: dict[str, FinishedSequence]) -> Texts:
    return {name: end.token_ids.tolist() for name, end in ends.items() if not end.error}


def without_victim(found: Texts) -> Texts:
    return {name: text for name, text in found.items() if name != "victim"}


# -------------------------------------------------------------------------------------------------- samplers


@pytest.mark.parametrize("mode", HostileSampler.MODES)
def test_what_a_sampler_does_wrong_for_one_sequence_ends_that_one_with_its_name(house: House, mode: str) -> None:
    engine = house.open(SAMPLER)
    HostileSampler.mode = mode
    ends = served(engine)
    assert without_victim(texts(ends)) == without_victim(house.plain)
    if mode == HostileSampler.HARMLESS:
        assert "victim" in texts(ends)
    else:
        assert f"{HERE}HostileSampler" in ends["victim"].error
    assert engine.totals.num_failed_steps == 0
    HostileSampler.mode = ""
    assert texts(served(engine)) == house.plain
    engine.close()


@pytest.mark.parametrize("mode", HostileSampler.MODES)
def test_a_fallback_takes_the_place_of_a_sampler_that_errs(
    house: House, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = house.open({**SAMPLER, "sampling.fallback": "greedy"})
    HostileSampler.mode = mode
    with caplog.at_level(logging.ERROR):
        ends = served(engine)
    if ON_CUDA and mode in ("negative", "beyond the vocabulary", "2^40"):
        # Seen once the step is done, which the fallback has not sampled then.
        assert "it chose token" in ends["victim"].error
    elif mode != HostileSampler.HARMLESS:
        assert texts(ends) == house.plain
        assert f"{HERE}HostileSampler" in caplog.text
        assert "its fallback takes over" in caplog.text
    assert without_victim(texts(ends)) == without_victim(house.plain)
    engine.close()


def test_a_sequence_whose_parameters_the_fallback_does_not_honour_ends_and_says_so(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostileSampler, "honours", frozenset({"greedy", "logprobs", "logit_bias"}))
    engine = house.open({**SAMPLER, "sampling.fallback": "greedy"})
    HostileSampler.mode = "raises"
    ends = served(engine, {"logit_bias": {3: 1.0}})
    assert "logit_bias" in ends["victim"].error
    assert texts(ends) == without_victim(house.plain)
    engine.close()


# ----------------------------------------------------------------------------------------------------- rules


@pytest.mark.parametrize(
    ("setup", "fallback"),
    [(RULE, ""), (RULE, "token"), (DISTRIBUTIONS, "match")],
    ids=["tokens", "tokens then distributions", "distributions then tokens"],
)
@pytest.mark.parametrize("mode", HostileRule.MODES)
def test_a_rule_that_errs_changes_no_text_and_is_named(
    house: House, mode: str, setup: Any, fallback: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = house.open({**setup, "acceptance.fallback": fallback})
    HostileRule.mode = mode
    with caplog.at_level(logging.ERROR):
        assert texts(served(engine, repetition_penalty=0.5)) == house.repeated
    assert Remembering.asked
    if not mode.startswith("writes"):
        assert f'acceptance component "{setup["acceptance.name"]}"' in caplog.text.replace("'", '"')
        assert ("its fallback takes over" if fallback else "No draft stands from now on") in caplog.text
        assert engine.totals.num_drafters_quarantined == (not fallback)
    engine.close()


@pytest.mark.parametrize("mode", HostileDistributions.LAST_MODES)
def test_a_distribution_of_the_last_token_that_is_none_changes_no_text_and_is_named(
    house: House, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    HostileDistributions.last_mode = mode
    with caplog.at_level(logging.ERROR):
        assert house.texts(DISTRIBUTIONS, repetition_penalty=0.5) == house.repeated
    assert f"{HERE}HostileDistributions" in caplog.text


@pytest.mark.parametrize("setup", [RULE, DISTRIBUTIONS], ids=["tokens", "distributions"])
def test_rules_that_do_right_stay(house: House, setup: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    assert house.texts(setup, repetition_penalty=0.5) == house.repeated
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("noun", ["fallback", "name"])
def test_a_rule_that_reads_distributions_is_refused_beside_a_sampler_that_gives_none(house: House, noun: str) -> None:
    with pytest.raises(CapabilityError, match=rf"\[acceptance\] {noun} = .*HostileDistributions"):
        house.open({**SAMPLER, **DRAFTED, f"acceptance.{noun}": f"{HERE}HostileDistributions"})


def test_synthetic_acceptance_makes_steps_as_long_as_it_is_told(house: House) -> None:
    setup = {**DRAFTED, "draft_length.name": "fixed", "acceptance.name": "synthetic"}
    engine = house.open({**setup, "acceptance.synthetic.mean_tokens": 4.0})
    ends = served(engine, max_tokens=16)
    assert {len(tokens) for tokens in texts(ends).values()} == {16}
    assert engine.totals.num_steps <= 7  # a prefill, then four tokens a step
    engine.close()


# ------------------------------------------------------------------------------------------------ processors


@pytest.mark.parametrize("drafted", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("mode", HostileProcessor.MODES)
def test_what_a_processor_does_wrong_ends_the_sequence_that_asked_for_it_with_its_name(
    house: House, mode: str, drafted: bool
) -> None:
    engine, asks = house.open({**PROCESSOR, **(DRAFTED if drafted else {})}), {"logits_processors": {"hostile": {}}}
    HostileProcessor.mode = mode
    ends = served(engine, asks)
    assert without_victim(texts(ends)) == without_victim(house.plain)
    if mode == HostileProcessor.HARMLESS:
        assert ends["victim"].token_ids.tolist() == [0] * NUM_TOKENS
    else:
        assert f'logits processor "{HERE}HostileProcessor"' in ends["victim"].error
    assert engine.totals.num_failed_steps == 0
    HostileProcessor.mode = ""
    assert texts(served(engine, asks)) == house.plain
    engine.close()


def test_a_request_whose_processors_take_no_drafts_is_not_drafted_for(house: House) -> None:
    setup = {
        "sampling.standard.processors": ["support.strategies.unsafe_parts:CountsCalls"],
        "engine.async_scheduling": False,
    }
    asks = {"logits_processors": {"counts_calls": {}}}
    assert house.texts({**setup, **DRAFTED}, special=asks) == house.texts(setup, special=asks)
    assert Remembering.asked == {"three", "nine"}


def test_parameters_that_leave_no_token_end_their_request_and_cost_no_other_a_step(house: House) -> None:
    engine = house.open({})
    ends = served(engine, {"allowed_token_ids": (4,), "bad_words_ids": ((4,),)})
    assert "allowed_token_ids and bad_words" in ends["victim"].error
    assert texts(ends) == without_victim(house.plain)
    assert engine.totals.num_failed_steps == engine.totals.num_recomputed_tokens == 0
    assert engine.totals.num_steps <= NUM_TOKENS + 2
    engine.close()
