from __future__ import annotations

import attrs
import pytest

from trencadis_kv.policies.config import CostAwareConfig


def test_every_setting_has_a_default_a_help_and_a_unit():
    CostAwareConfig()
    for field in attrs.fields(CostAwareConfig):
        assert field.metadata["help"]
        assert field.metadata["unit"]


@pytest.mark.parametrize("name", ["max_load_fraction", "max_staged_fraction"])
@pytest.mark.parametrize("value", [0.0, -0.1, 1.1])
def test_fractions_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        CostAwareConfig(**{name: value})
