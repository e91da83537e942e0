from __future__ import annotations

import pytest

from trencadis.config import load_config
from trencadis_gallery.bucketing.workloads import DeviceCost
from trencadis_gallery.config import FittedConfig


def test_constants_of_the_estimates_are_a_table_below():
    resolved = load_config(
        components={"bucketing": {"fitted": FittedConfig}}, environ={}, flags=["--bucketing.fitted.cost.compile-s", "3"]
    )
    assert resolved.config.bucketing.components["fitted"] == FittedConfig(cost=DeviceCost(compile_s=3.0))
    assert resolved.settings.get("bucketing.fitted.cost.block_s").unit == "s"


@pytest.mark.parametrize("field", ["max_graphs", "max_compile_s", "max_graph_bytes", "reserve_ratio"])
def test_budget_is_never_negative(field):
    with pytest.raises(ValueError, match=field):
        FittedConfig(**{field: -1})


def test_reserve_is_no_more_than_what_ran():
    with pytest.raises(ValueError, match="reserve_ratio"):
        FittedConfig(reserve_ratio=1.1)
