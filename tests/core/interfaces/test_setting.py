from __future__ import annotations

import attrs
import pytest
from attrs.validators import ge

from trencadis.interfaces.setting import setting


@attrs.frozen(kw_only=True)
class Table:
    limit: int = setting(3, "Most tiles.", unit="tiles", validator=ge(1))
    names: tuple[str, ...] = setting(None, "Of tiles.", factory=tuple, secret=True)


def test_a_setting_has_its_default_and_tells_its_meaning_unit_and_secrecy():
    limit, names = attrs.fields(Table)
    assert Table().limit == 3
    assert limit.metadata == {"help": "Most tiles.", "unit": "tiles", "secret": False}
    assert names.metadata == {"help": "Of tiles.", "unit": "", "secret": True}


def test_a_factory_makes_each_default_anew_and_the_default_is_not_used():
    assert Table().names == ()


def test_a_setting_is_validated():
    with pytest.raises(ValueError, match="limit"):
        Table(limit=0)
