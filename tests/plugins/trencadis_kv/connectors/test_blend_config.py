from __future__ import annotations

import pytest

from trencadis_kv.connectors.blend.config import BlendConfig


def test_defaults_are_valid():
    assert BlendConfig().min_chunk_tokens <= BlendConfig().chunk_tokens


@pytest.mark.parametrize(
    "wrong",
    [
        {"ratio": 1.5},
        {"ratio": -0.1},
        {"saves": "some"},
        {"chunk_tokens": 64, "min_chunk_tokens": 65},
        {"capacity_bytes": 0},
        {"min_found_ratio": 2},
        {"num_first_tokens": -1},
        {"step_budget_s": 0},
    ],
)
def test_impossible_values_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong)) if len(wrong) == 1 else "min_chunk_tokens"):
        BlendConfig(**wrong)
