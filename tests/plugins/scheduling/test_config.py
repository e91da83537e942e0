from __future__ import annotations

import attrs
import pytest

from trencadis_plugins.scheduling.config import FcfsConfig


@pytest.mark.parametrize("field", attrs.fields(FcfsConfig), ids=lambda field: field.name)
def test_every_setting_is_explained_in_tokens_and_refuses_negative_numbers(field):
    assert field.metadata["help"].endswith(".")
    assert field.metadata["unit"] == "tokens"
    assert getattr(FcfsConfig(), field.name) == 0
    with pytest.raises(ValueError, match=field.name):
        FcfsConfig(**{field.name: -1})
