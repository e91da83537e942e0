from __future__ import annotations

import pytest

from trencadis.config import load_config
from trencadis.errors import ConfigError
from trencadis_plugins.acceptance.config import TypicalConfig

COMPONENTS = {"acceptance": {"typical": TypicalConfig}}


def load(*flags: str):
    return load_config(components=COMPONENTS, environ={}, flags=list(flags)).config.acceptance.components


@pytest.mark.parametrize(
    "flag",
    [
        "typical.epsilon=0",
        "typical.epsilon=1",
        "typical.delta=0",
    ],
)
def test_a_value_out_of_range_is_refused(flag):
    with pytest.raises(ConfigError):
        load(f"--acceptance.{flag}")
