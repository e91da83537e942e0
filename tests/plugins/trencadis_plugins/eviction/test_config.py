from __future__ import annotations

import pytest

from trencadis_plugins.eviction.config import CostAwareConfig, LfuConfig, TtlConfig


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [
        (LfuConfig, "half_life_s", -1.0),
        (LfuConfig, "history", -0.5),
        (CostAwareConfig, "attention_blocks", -1),
        (TtlConfig, "pinned_blocks", -1),
        (TtlConfig, "pinned_s", 0.0),
    ],
)
def test_value_out_of_range_is_refused(config: type, key: str, value: float) -> None:
    with pytest.raises(ValueError, match=key):
        config(**{key: value})
