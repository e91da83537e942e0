from __future__ import annotations

import attrs
import pytest

from trencadis_kv.connectors.tiered.config import TieredConfig


def test_every_setting_has_a_default_and_a_help():
    TieredConfig()
    assert all(field.metadata["help"] for field in attrs.fields(TieredConfig))


def test_children_are_components_that_the_plan_finds():
    assert attrs.fields(TieredConfig).children.metadata["component"] == "kv_connector"


@pytest.mark.parametrize(
    "values",
    [
        {"children": ()},
        {"children": ("a", "b", "a")},
        {"children": (1,)},
        {"lookup_timeout_s": 0.0},
        {"release_timeout_s": 0.0},
        {"failure_limit": 0},
        {"failure_window_s": 0.0},
        {"cooldown_s": 0.0},
    ],
)
def test_values_out_of_range_are_refused(values):
    with pytest.raises((ValueError, TypeError), match=next(iter(values))):
        TieredConfig(**values)
