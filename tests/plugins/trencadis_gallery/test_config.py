from __future__ import annotations

import attrs
import pytest

from trencadis.config import load_config
from trencadis.errors import ConfigError
from trencadis_gallery.bucketing.workloads import DeviceCost
from trencadis_gallery.config import (
    FittedConfig,
    MultiLevelConfig,
    S3FifoConfig,
    SlruConfig,
    SyntheticConfig,
    TwoQueueConfig,
)


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [
        (SlruConfig, "protected_uses", 0),
        (SlruConfig, "protected_ratio", 1.5),
        (TwoQueueConfig, "new_ratio", -0.1),
        (S3FifoConfig, "small_ratio", 2.0),
        *(
            (MultiLevelConfig, one.name, -1)
            for one in attrs.fields(MultiLevelConfig)
            if type(one.default) in (int, float)
        ),
        (MultiLevelConfig, "quantum_tokens", 0),
        *((FittedConfig, name, -1) for name in ("max_graphs", "max_compile_s", "max_graph_bytes", "reserve_ratio")),
        (FittedConfig, "reserve_ratio", 1.1),  # no more than what ran
    ],
)
def test_value_out_of_range_is_refused(config: type, key: str, value: float) -> None:
    with pytest.raises(ValueError, match=key):
        config(**{key: value})


def load(*flags: str):
    components = {"acceptance": {"synthetic": SyntheticConfig}}
    return load_config(components=components, environ={}, flags=list(flags)).config.acceptance.components["synthetic"]


def test_rates_are_read_from_one_flag() -> None:
    assert load("--acceptance.synthetic.rates=0.9,0.5").rates == (0.9, 0.5)


@pytest.mark.parametrize("flag", ["rates=1.1", "rates=0.5,-0.1", "mean-tokens=0.5", "mean-tokens=-1"])
def test_a_rate_or_a_mean_out_of_range_is_refused(flag: str) -> None:
    with pytest.raises(ConfigError):
        load(f"--acceptance.synthetic.{flag}")


def test_a_mean_becomes_rates_of_one_a_share_and_none() -> None:
    assert SyntheticConfig(mean_tokens=3.25).place_rates() == (1.0, 1.0, 0.25, 0.0)
    assert SyntheticConfig(mean_tokens=1.0).place_rates() == (0.0, 0.0)
    assert SyntheticConfig(rates=(0.3,)).place_rates() == (0.3,)


def test_constants_of_the_estimates_are_a_table_below():
    resolved = load_config(
        components={"bucketing": {"fitted": FittedConfig}}, environ={}, flags=["--bucketing.fitted.cost.compile-s", "3"]
    )
    assert resolved.config.bucketing.components["fitted"] == FittedConfig(cost=DeviceCost(compile_s=3.0))
    assert resolved.settings.get("bucketing.fitted.cost.block_s").unit == "s"
