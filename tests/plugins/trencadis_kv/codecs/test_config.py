from __future__ import annotations

import attrs
import pytest

from trencadis_kv.codecs.config import AesGcmConfig, ZstdConfig


@pytest.mark.parametrize("config_class", [AesGcmConfig, ZstdConfig])
def test_every_setting_has_a_default_and_a_help(config_class):
    config_class()
    assert all(field.metadata["help"] for field in attrs.fields(config_class))


@pytest.mark.parametrize("values", [{"level": 23}, {"level": -8}, {"item_bytes": 3}, {"item_bytes": 16}])
def test_values_out_of_range_are_refused(values):
    with pytest.raises(ValueError, match=next(iter(values))):
        ZstdConfig(**values)


def test_the_codec_within_is_a_component_that_the_plan_finds():
    assert attrs.fields(AesGcmConfig).inner.metadata["component"] == "kv_codec"
