from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import pytest
from attrs.validators import ge

from trencadis.config.convert import structure
from trencadis.config.named_tables import is_named_tables, structure_tables
from trencadis.interfaces.setting import setting


@attrs.frozen(kw_only=True)
class Row:
    size: int = setting(1, "Size.", validator=ge(0))
    name: str = setting("", "Name.")

    def __attrs_post_init__(self) -> None:
        if self.name == "taken":
            raise ValueError("that name is taken")


KIND = Mapping[str, Row]


def convert(value: Any, kind: Any) -> Any:
    return structure(kind, value)


@pytest.mark.parametrize(("kind", "answer"), [(KIND, True), (Mapping[str, int], False), (Row, False), (dict, False)])
def test_only_a_mapping_to_a_config_class_is_one(kind: Any, answer: bool) -> None:
    assert is_named_tables(kind) is answer


def test_each_name_gets_its_object_and_objects_stay_as_they_are() -> None:
    given = {"a": {"size": 3}, "b": {}, "c": Row(size=9)}
    assert structure_tables(KIND, given, convert) == {"a": Row(size=3), "b": Row(), "c": Row(size=9)}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, r"must be a table of tables\."),
        ({"a": 3}, r"a = 3 must be a table\."),
        ({"a": {"sise": 3}}, r'a: no such key as sise\. Did you mean "size"\? It has: size, name\.'),
        ({"a": {"size": "3"}}, r'a: size = "3": must be a whole number\.'),
        ({"a": {"size": -1}}, r"a: size = -1 must be >= 0\."),
        ({"a": {"name": "taken"}}, r"a: that name is taken\."),
    ],
)
def test_what_is_wrong_is_said_with_its_place(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        structure_tables(KIND, value, convert)
