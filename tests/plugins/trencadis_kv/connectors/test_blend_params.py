from __future__ import annotations

import pytest

from trencadis_kv.connectors.blend.prompt import blend_ratio_of, wants_blend


@pytest.mark.parametrize(
    ("params", "asks"),
    [(None, False), ({}, False), ({"blend": True}, True), ({"blend": 1}, False), ({"blend": "true"}, False)],
)
def test_only_true_asks(params, asks):
    assert wants_blend(params) is asks


@pytest.mark.parametrize(
    ("given", "ratio"),
    [(0, 0.0), (1, 1.0), (0.3, 0.3), (True, None), ("0.3", None), (-0.1, None), (1.1, None), (None, None)],
)
def test_ratio_is_a_share_or_nothing(given, ratio):
    assert blend_ratio_of({"blend_ratio": given}, 0.15) == ratio


def test_ratio_is_the_configured_one_if_the_request_names_none():
    assert blend_ratio_of({"blend": True}, 0.15) == 0.15
    assert blend_ratio_of(None, 0.25) == 0.25
