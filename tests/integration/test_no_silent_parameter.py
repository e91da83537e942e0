"""A parameter of a request has its effect or is refused: every sampler, with and without drafts, overlap and static shapes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import attrs
import pytest

from support.backends import tiny_models
from support.devices import DEVICE
from trencadis.engine.build import build_engine
from trencadis.errors import ContractError, InvalidRequestError
from trencadis.records import PARAMETER_GROUPS, Request, SamplingParams, parameters_in
from trencadis.registry import Registry
from trencadis.registry.startup import load_with_plugins
from trencadis_plugins.sampling.standard import StandardSampler
from trencadis_plugins.sampling.top_k import TopK

NUM_TOKENS = 14
PROMPT = (5, 9, 7, 5, 9, 7, 5, 9)
SEED = 5
"""With it every parameter changes the text that the standard sampler draws."""


class LittleSampler(StandardSampler):
    """Honours top-k and nothing else that changes a distribution."""

    def __init__(self) -> None:
        super().__init__([TopK()])


class MisspeltSampler(LittleSampler):
    """States a parameter that there is not."""

    def __init__(self) -> None:
        super().__init__()
        self.honours = frozenset({"topk"})


BUILT_IN = tuple(Registry.discover().components("sampling"))
SAMPLERS = {**{name: name for name in BUILT_IN}, "little": f"{__name__}:LittleSampler"}
HONOURED = {
    "standard": parameters_in(PARAMETER_GROUPS),
    "greedy": frozenset({"greedy", "logprobs"}),
    "little": frozenset({"greedy", "logprobs", "top_k"}),
}
DRAFTERS = ("none", "ngram", "suffix")
SETUPS = {
    "overlap": {},
    "no overlap": {"engine.async_scheduling": False},
    "static shapes": {"backend.torch.layout": "padded", "bucketing.name": "exponential"},
}
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.05},
    "top_k": {"top_k": 1},
    "top_p": {"top_p": 0.05},
    "min_p": {"min_p": 0.9},
    "typical_p": {"typical_p": 0.02},
    "epsilon_cutoff": {"epsilon_cutoff": 0.3},
    "eta_cutoff": {"eta_cutoff": 0.9},
    "top_n_sigma": {"top_n_sigma": 0.1},
    "xtc_probability": {"xtc_probability": 1.0, "xtc_threshold": 0.02},
    "mirostat_mode": {"mirostat_mode": 2, "mirostat_tau": 0.1},
    "allowed_token_ids": {"allowed_token_ids": (11, 12)},
    "bad_token_ids": {"bad_token_ids": tuple(range(0, 131, 2))},
    "bad_words_ids": {"bad_words_ids": tuple((token,) for token in range(0, 131, 2))},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "min_tokens": {"min_tokens": NUM_TOKENS, "stop_token_ids": tuple(range(0, 131, 2)), "ignore_eos": False},
    "logit_bias": {"logit_bias": {13: 100.0}},
    "repetition_penalty": {"repetition_penalty": 10.0},
    "frequency_penalty": {"frequency_penalty": 2.0},
    "presence_penalty": {"presence_penalty": 2.0},
    "dry_multiplier": {"dry_multiplier": 100.0, "dry_base": 100.0, "dry_allowed_length": 1},
    "logprobs": {"logprobs": 2},
}


def test_every_parameter_of_every_group_is_tried() -> None:
    assert set(REQUESTS) == parameters_in(PARAMETER_GROUPS)
    assert set(HONOURED) == set(SAMPLERS)
    for name, params in REQUESTS.items():
        assert SamplingParams(**params).asked == (name,)


def test_every_other_parameter_is_known_not_to_be_a_sampler_s() -> None:
    others = {
        *("n", "best_of", "seed", "max_tokens", "max_draft_tokens"),
        *("stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens"),
        *("xtc_threshold", "mirostat_tau", "mirostat_eta"),
        *("dry_base", "dry_allowed_length", "dry_range", "dry_breaker_token_ids"),
        *("logits_processors", "structured", "prompt_logprobs"),
    }
    fields = {field.name for field in attrs.fields(SamplingParams)}
    assert fields == others | (parameters_in(PARAMETER_GROUPS) - {"greedy"})


def test_a_greedy_request_asks_for_nothing_that_changes_draws_alone() -> None:
    params = SamplingParams(temperature=0, top_k=5, top_p=0.9, min_p=0.1, typical_p=0.5, mirostat_mode=2)
    assert params.asked == ("greedy",)
    assert SamplingParams().asked == SamplingParams(top_k=-1, seed=3, max_tokens=5).asked == ()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_model("llama", tmp_path_factory.mktemp("models"))


def make(model: Path, sampler: str, drafter: str = "none", setup: str = "overlap") -> Any:
    options = {
        "model": {"path": str(model), "dtype": "float32", "max_model_len": 64},
        "engine": {"max_num_seqs": 32, "max_num_batched_tokens": 256, "warmup": False},
        "cache": {"block_size": 8, "num_blocks": 256, "prefix_caching": False},
        "backend": {"torch": {"device": DEVICE, "check_model": False}},
        "observer": {"names": []},
        "speculation.name": drafter,
        "sampling.name": SAMPLERS.get(sampler, sampler),
        **SETUPS[setup],
    }
    resolved, registry = load_with_plugins(environ={}, overrides=options)
    return build_engine(resolved.config, registry=registry)


def texts_of(engine: Any, requests: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], dict[str, InvalidRequestError]]:
    """Return the tokens of the requests that run, and why the others do not."""
    texts, refused = {}, {}
    for name, given in requests.items():
        params = SamplingParams(**({"seed": SEED, "max_tokens": NUM_TOKENS, "ignore_eos": True} | given))
        try:
            engine.add(Request(request_id=name, prompt_token_ids=PROMPT, params=params))
        except InvalidRequestError as error:
            refused[name] = error
    num_logprobs = 0
    while engine.has_work:
        result = engine.step()
        num_logprobs += len(result.logprobs)
        for end in result.finished:
            assert not end.error
            texts[end.request_id] = tuple(end.token_ids.tolist())
    assert num_logprobs == len(texts.get("logprobs", ()))
    return texts, refused


@pytest.mark.representatives(1, ci=3)
@pytest.mark.parametrize(
    "combinations",
    [
        pytest.param(list(zip(DRAFTERS, SETUPS, strict=True)), id="each once"),
        pytest.param(list(itertools.product(DRAFTERS, SETUPS)), id="all", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_parameter_has_its_effect_or_is_refused_by_name_whatever_else_is_configured(
    model: Path, sampler: str, combinations: list[tuple[str, str]]
) -> None:
    expected: dict[str, Any] = {}
    for drafter, setup in combinations:
        engine = make(model, sampler, drafter, setup)
        try:
            texts, refused = texts_of(engine, {"plain": {}, **REQUESTS})
        finally:
            engine.close()
        assert set(refused) == set(REQUESTS) - HONOURED[sampler], (drafter, setup)
        for name, error in refused.items():
            assert error.field == ("temperature" if name == "greedy" else name)
            assert f"{error.field} = " in str(error)
            assert SAMPLERS[sampler] in str(error)
        # Without speculation is the first of all: every combination must give its texts.
        expected = expected or texts
        assert texts == expected, (drafter, setup)
    for name in HONOURED[sampler] - {"logprobs"}:
        is_inert = sampler == "greedy"  # it takes the most likely token, asked or not
        assert (expected[name] == expected["plain"]) == is_inert, name


@pytest.mark.parametrize("sampler", ["greedy", "little"])
@pytest.mark.parametrize("given", [{"structured": {"kind": "regex", "text": "a+"}}, {"logits_processors": {"x": {}}}])
def test_structure_and_processors_are_refused_by_a_sampler_without_them(
    model: Path, sampler: str, given: dict[str, Any]
) -> None:
    engine = make(model, sampler)
    try:
        _, refused = texts_of(engine, {"it": given})
    finally:
        engine.close()
    assert refused["it"].field == next(iter(given))


def test_a_sampler_that_states_what_is_no_parameter_is_refused_in_words(model: Path) -> None:
    with pytest.raises(ContractError, match=r"MisspeltSampler.*'topk' is no parameter .* groups: temperature, trunc"):
        make(model, f"{__name__}:MisspeltSampler")
