from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from trencadis.errors import InvalidRequestError
from trencadis.records import PARAMETER_GROUPS, SamplingParams, parameters_in


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("best_of", [0, 129, 1.0], [1, 128, None]),
        ("typical_p", [0, 1.01, math.nan, "a"], [0.001, 1]),
        ("epsilon_cutoff", [-0.1, 1], [0, 0.99]),
        ("eta_cutoff", [-0.1, 1], [0, 0.99]),
        ("top_n_sigma", [-1, 101], [0, 100]),
        ("xtc_probability", [-0.1, 1.1], [0, 1]),
        ("xtc_threshold", [0, 1.1], [0.01, 1]),
        ("mirostat_mode", [1, True, 2.0], [0, 2]),
        ("mirostat_tau", [0, 101], [0.1, 100]),
        ("mirostat_eta", [0, 1.1], [0.1, 1]),
        ("dry_multiplier", [-1, 101], [0, 100]),
        ("dry_base", [0.9, 101], [1, 100]),
        ("dry_allowed_length", [0, 1.5], [1, 1000]),
        ("dry_range", [-1], [0, 10]),
        ("dry_breaker_token_ids", [[-1], ["a"], 5], [(), (3,)]),
        ("allowed_token_ids", [[-1], 5], [None, (3,)]),
        ("bad_token_ids", [5], [(3,)]),
        ("stop_token_ids", [5], [(3,)]),
        ("stop", [5, [5]], [("a",)]),
        ("no_repeat_ngram_size", [-1, 2.5], [0, 3]),
        ("max_draft_tokens", [-1, 1.0, True], [0, 8, None]),
        ("bad_words_ids", [[[]], [[1, -1]], [[True]], 5, [5]], [(), ((1, 2),)]),
        ("logits_processors", [{"": {}}, {"a": 5}, "ab"], [{"a": {"b": 1}}]),
    ],
)
def test_values_out_of_range_are_refused_by_name(name: str, wrong: list[Any], right: list[Any]) -> None:
    for value in wrong:
        with pytest.raises(InvalidRequestError, match=f"sampling parameter {name} = .* it must be"):
            SamplingParams(**{name: value})
    for value in right:
        assert getattr(SamplingParams(**{name: value}), name) == value


def test_n_are_chosen_from_at_least_as_many() -> None:
    with pytest.raises(InvalidRequestError, match="best_of = 2 is impossible: it must be at least n = 3"):
        SamplingParams(n=3, best_of=2)
    assert [SamplingParams(n=2, best_of=given).num_generated for given in (None, 2, 5)] == [2, 2, 5]
    assert [SamplingParams(n=2, best_of=given).is_chosen for given in (None, 2, 5)] == [False, False, True]


def test_a_token_id_outside_the_vocabulary_is_found_in_any_field() -> None:
    assert SamplingParams().token_id_outside(1) is None
    fields: dict[str, Any] = {
        "logit_bias": {99: 1.0},
        "allowed_token_ids": (99,),
        "bad_token_ids": (99,),
        "stop_token_ids": (99,),
        "dry_breaker_token_ids": (99,),
        "bad_words_ids": ((1,), (99, 2)),
    }
    for name, value in fields.items():
        assert SamplingParams(**{name: value}).token_id_outside(99) == (name, 99)
        assert SamplingParams(**{name: value}).token_id_outside(100) is None


def test_a_refusal_knows_its_field() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(min_tokens=9, max_tokens=3)
    assert caught.value.field == "min_tokens"


def test_names_of_groups_and_of_parameters_are_read_and_others_refused() -> None:
    assert parameters_in(["truncation", "logprobs"]) == {"top_k", "top_p", "min_p", "logprobs"}
    assert parameters_in(["temperature", "greedy"]) == {"greedy", "temperature"}
    assert parameters_in(["top_k"]) == {"top_k"}
    with pytest.raises(ValueError, match="'max_tokens' is no parameter that a sampler honours; groups: temperature"):
        parameters_in(["max_tokens"])


def test_the_page_of_samplers_has_every_group_with_its_parameters() -> None:
    page = (Path(__file__).parents[3] / "docs" / "plugins" / "sampling.md").read_text()
    for group, names in PARAMETER_GROUPS.items():
        (line,) = [line for line in page.splitlines() if line.startswith(f"| `{group}` |") and line.count("|") == 3]
        assert all(f"`{name}`" in line for name in names)
