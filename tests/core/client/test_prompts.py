from __future__ import annotations

import numpy as np
import pytest

from trencadis.client.prompts import as_list, as_token_ids, at_prompt, is_single, per_prompt, terms_per_prompt
from trencadis.errors import InvalidRequestError, PromptTooLongError
from trencadis.records import RequestTerms


@pytest.mark.parametrize(
    ("prompts", "listed"),
    [
        ("one", ["one"]),
        ([1, 2], [[1, 2]]),
        ((1, 2), [(1, 2)]),
        (["one", "two"], ["one", "two"]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["one", [2]], ["one", [2]]),
        ([], []),
    ],
)
def test_every_shape_of_prompts_becomes_a_list(prompts: object, listed: object) -> None:
    assert as_list(prompts) == listed  # type: ignore[arg-type]
    assert is_single(prompts) == (len(listed) == 1 and prompts != listed)  # type: ignore[arg-type]


def test_an_array_of_token_ids_is_one_prompt() -> None:
    array = np.array([4, 5], np.int32)
    assert is_single(array)  # type: ignore[arg-type]
    ids = as_token_ids(array)  # type: ignore[arg-type]
    assert ids == (4, 5)
    assert {type(token) for token in ids} == {int}


@pytest.mark.parametrize("prompts", [7, None, {"prompt": "one"}, b"one"])
def test_what_is_no_prompt_is_refused(prompts: object) -> None:
    with pytest.raises(InvalidRequestError, match="neither text nor token ids"):
        as_list(prompts)  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", [[1, "a"], [1.0], [True], 3, {"a": 1}])
def test_what_holds_other_things_than_whole_numbers_is_refused(prompt: object) -> None:
    with pytest.raises(InvalidRequestError, match="token ids"):
        as_token_ids(prompt)  # type: ignore[arg-type]


def test_an_error_says_which_prompt_it_is_about_and_stays_what_it_is() -> None:
    error = at_prompt(PromptTooLongError("too long."), 3)
    assert (type(error), str(error)) == (PromptTooLongError, "prompts[3]: too long.")


def test_a_single_value_is_for_all_prompts_and_a_list_for_each() -> None:
    assert per_prompt(None, 2, name="x", default=0) == [0, 0]
    assert per_prompt("a", 2, name="x", default="") == ["a", "a"]
    assert per_prompt(["a", "b"], 2, name="x", default="") == ["a", "b"]
    with pytest.raises(InvalidRequestError, match="x has 1 entries for 2 prompts"):
        per_prompt(["a"], 2, name="x", default="")


def test_one_value_is_for_all_a_list_for_each_and_none_is_the_default() -> None:
    given = terms_per_prompt(
        2,
        {
            "priorities": [3, 1],
            "tenants": "acme",
            "weights": None,
            "ttft_targets_s": (0.5, 1.0),
            "tpot_targets_s": None,
        },
    )
    assert given == [
        RequestTerms(priority=3, tenant="acme", ttft_target_s=0.5),
        RequestTerms(priority=1, tenant="acme", ttft_target_s=1.0),
    ]


def test_a_list_of_another_length_is_refused_by_the_name_its_user_knows() -> None:
    with pytest.raises(InvalidRequestError, match=r"priorities has 1 entries for 2 prompts"):
        terms_per_prompt(2, {"priorities": [3]})


def test_an_unknown_parameter_is_refused_as_any_function_refuses_it() -> None:
    with pytest.raises(TypeError, match=r"generate\(\) got an unexpected keyword argument 'priority'"):
        terms_per_prompt(2, {"priority": 3})  # type: ignore[typeddict-unknown-key]
