from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from trencadis_server.protocol.completions import MAX_PROMPTS, CompletionRequest


@pytest.mark.parametrize("prompt", ["x", "", ["x", ""], [1, 2], [[1], [2, 3]], ["x"] * MAX_PROMPTS])
def test_each_form_of_a_prompt_stays_as_it_is(prompt: Any) -> None:
    assert CompletionRequest.model_validate({"model": "m", "prompt": prompt}).prompt == prompt


@pytest.mark.parametrize(
    "prompt", [[], [[]], [1, "x"], [-1], [2**31], [1.0], [True], 5, None, ["x"] * (MAX_PROMPTS + 1)]
)
def test_anything_else_is_no_prompt(prompt: Any) -> None:
    with pytest.raises(ValidationError):
        CompletionRequest.model_validate({"model": "m", "prompt": prompt})
