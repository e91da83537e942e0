from __future__ import annotations

import attrs
import pytest
from attrs.validators import ge

from trencadis.interfaces import Component
from trencadis.interfaces.setting import setting


def _component(**changes):
    return Component(
        **{"name": "x", "factory": lambda config, context: None, "summary": "Of a test.", "interface_version": 1}
        | changes
    )


@pytest.mark.parametrize("field", ["requires", "provides"])
def test_capabilities_are_a_set_of_names(field):
    assert getattr(_component(**{field: ["backend.padded"]}), field) == frozenset({"backend.padded"})


@pytest.mark.parametrize("field", ["requires", "provides"])
def test_one_text_is_no_set_of_capabilities(field):
    with pytest.raises(TypeError) as caught:
        _component(**{field: "backend.padded"})
    assert str(caught.value) == (
        "requires and provides are sets of capabilities: write {'backend.padded'}, not 'backend.padded'"
    )


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


def test_a_component_is_provisional_unless_it_says_otherwise_and_says_one_of_three_words() -> None:
    def offered(**stability: str) -> Component:
        return Component(name="one", factory=print, summary="", interface_version=1, **stability)

    assert offered().stability == "provisional"
    assert offered(stability="stable").stability == "stable"
    with pytest.raises(ValueError, match="'stabel'"):
        offered(stability="stabel")
