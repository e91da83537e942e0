from __future__ import annotations

import math

import pytest

from trencadis.records import Request


def test_a_request_asks_for_nothing_special_by_itself() -> None:
    request = Request(request_id="a", prompt_token_ids=[1, 2], tenant="t")
    assert request.prompt_token_ids == (1, 2)
    assert (request.cache_salt, request.weight) == ("t", 1.0)
    assert request.ttft_target_s == request.tpot_target_s == math.inf


@pytest.mark.parametrize("field", ["weight", "ttft_target_s", "tpot_target_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_weights_and_targets_are_above_zero(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        Request(request_id="a", prompt_token_ids=(1,), **{field: value})


def test_no_share_is_infinite() -> None:
    with pytest.raises(ValueError, match="weight"):
        Request(request_id="a", prompt_token_ids=(1,), weight=math.inf)
