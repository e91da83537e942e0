from __future__ import annotations

import attrs
import pytest

from trencadis_kv.connectors.filesystem.config import FilesystemConfig


def test_defaults_need_no_configuration_and_trust_nobody():
    config = FilesystemConfig()
    assert (config.path, config.max_bytes, config.trust_others) == ("", 32 * 2**30, False)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_bytes", -1),
        ("low_water_ratio", 1.1),
        ("low_water_ratio", -0.1),
        ("min_free_ratio", 1.0),
        ("namespace", ".."),
    ],
)
def test_option_out_of_range_is_refused(option, value):
    with pytest.raises(ValueError, match=option):
        FilesystemConfig(**{option: value})


def test_every_option_says_what_it_means():
    assert all(field.metadata["help"].endswith(".") for field in attrs.fields(FilesystemConfig))
