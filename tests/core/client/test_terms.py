from __future__ import annotations

import pytest

from trencadis.client.terms import terms_per_prompt
from trencadis.errors import InvalidRequestError
from trencadis.records import RequestTerms


def test_one_value_is_for_all_a_list_for_each_and_none_is_the_default() -> None:
    given = terms_per_prompt(
        2, priority=[3, 1], tenant="acme", weight=None, ttft_target_s=(0.5, 1.0), tpot_target_s=None
    )
    assert given == [
        RequestTerms(priority=3, tenant="acme", ttft_target_s=0.5),
        RequestTerms(priority=1, tenant="acme", ttft_target_s=1.0),
    ]


def test_a_list_of_another_length_is_refused_by_the_name_its_user_knows() -> None:
    with pytest.raises(InvalidRequestError, match=r"priorities has 1 entries for 2 prompts"):
        terms_per_prompt(2, priority=[3])
