from __future__ import annotations

import pytest

from trencadis.api import load_with_plugins
from trencadis_tools.doctor.division import check_division


def check(found, **sizes) -> None:
    resolved, registry = load_with_plugins(
        environ={}, overrides={f"parallel.{key}": size for key, size in sizes.items()}
    )
    check_division(found, resolved.config, registry)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"tensor": 3}, "[parallel] tensor = 3: 8 query heads and 4 KV heads go over 1, 2, 4, 8 ranks"),
        ({"pipeline": 6}, "[parallel] pipeline = 6: 5 layers make 1 to 5 stages"),
        ({"tensor": 2, "expert": 2}, "[parallel] expert = 2: the model has no experts"),
    ],
)
def test_ranks_that_the_model_cannot_be_divided_over_are_wrong(found, told, sizes, said) -> None:
    check(found, **sizes)
    ((kind, message),) = told()
    assert kind == "fail"
    assert message.startswith(said)


def test_a_legal_division_is_said_and_one_rank_needs_no_look_at_the_model(found, told) -> None:
    check(found)
    assert told() == []
    check(found, tensor=2)
    assert told() == [("ok", "LlamaForCausalLM can be divided: tensor 2, pipeline 1, expert 1")]
