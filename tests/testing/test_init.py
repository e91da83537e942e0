from __future__ import annotations

import pytest

import trencadis_testing


@pytest.mark.parametrize("name", trencadis_testing.__all__)
def test_every_public_name_is_found_at_its_home(name):
    assert getattr(trencadis_testing, name).__name__ == name
    assert name in dir(trencadis_testing)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'trencadis_testing' has no attribute 'Nothing'"):
        trencadis_testing.Nothing  # noqa: B018 - the access is what is tested
