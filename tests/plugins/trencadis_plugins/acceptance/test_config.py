from __future__ import annotations

import pytest

from trencadis.config import load_config
from trencadis.errors import ConfigError
from trencadis_plugins.acceptance.config import SyntheticConfig, TypicalConfig

COMPONENTS = {"acceptance": {"synthetic": SyntheticConfig, "typical": TypicalConfig}}


def load(*flags: str):
    return load_config(components=COMPONENTS, environ={}, flags=list(flags)).config.acceptance.components


def test_rates_are_read_from_one_flag():
    assert load("--acceptance.synthetic.rates=0.9,0.5")["synthetic"].rates == (0.9, 0.5)


@pytest.mark.parametrize(
    "flag",
    [
        "synthetic.rates=1.1",
        "synthetic.rates=0.5,-0.1",
        "synthetic.mean-tokens=0.5",
        "synthetic.mean-tokens=-1",
        "typical.epsilon=0",
        "typical.epsilon=1",
        "typical.delta=0",
    ],
)
def test_a_value_out_of_range_is_refused(flag):
    with pytest.raises(ConfigError):
        load(f"--acceptance.{flag}")


def test_a_mean_becomes_rates_of_one_a_share_and_none():
    assert SyntheticConfig(mean_tokens=3.25).place_rates() == (1.0, 1.0, 0.25, 0.0)
    assert SyntheticConfig(mean_tokens=1.0).place_rates() == (0.0, 0.0)
    assert SyntheticConfig(rates=(0.3,)).place_rates() == (0.3,)
