from __future__ import annotations

import attrs
import pytest

from trencadis_plugins.bucketing.config import ExponentialConfig, LinearConfig

FIELDS = [(config, field) for config in (ExponentialConfig, LinearConfig) for field in attrs.fields(config)]


@pytest.mark.parametrize(
    ("config", "field"), FIELDS, ids=[f"{config.__name__}.{field.name}" for config, field in FIELDS]
)
def test_every_setting_is_explained_has_a_unit_and_refuses_less_than_its_default(config, field):
    assert field.metadata["help"].endswith(".")
    assert field.metadata["unit"] in {"sizes", "sequences", "tokens", "blocks"}
    assert getattr(config(), field.name) == field.default
    with pytest.raises(ValueError, match=field.name):
        config(**{field.name: field.default - 1})
