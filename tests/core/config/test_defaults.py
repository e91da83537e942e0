from __future__ import annotations

import collections.abc
from pathlib import Path
from typing import Any, Literal

import attrs
import pytest
from attrs.validators import ge

from trencadis.config import check_defaults, settings_of_table
from trencadis.errors import ConfigValueError


def _check(kind, **field):
    config_class = attrs.make_class("Tiles", {"size": attrs.field(type=kind, **field)})
    check_defaults(settings_of_table("bucketing.tiles", config_class), "bucketing.tiles")


def _said(kind, **field):
    with pytest.raises(ConfigValueError) as caught:
        _check(kind, **field)
    return str(caught.value)


@attrs.frozen
class Tile:
    colour: str = "blue"


@pytest.mark.parametrize(
    ("kind", "default"),
    [
        (float, 1),
        (int | None, None),
        (Path, Path("x")),
        (tuple[str, ...], ()),
        (Literal["auto"] | int, 3),
        (dict[str, float], attrs.Factory(dict)),
        (Any, 1j),
        (tuple[Tile, ...], (Tile(),)),
        (collections.abc.Mapping[str, Tile], attrs.Factory(dict)),
        (Tile | None, Tile()),
    ],
)
def test_a_default_of_its_type_is_left_alone(kind, default):
    _check(kind, default=default)


def test_a_default_of_another_type_is_refused():
    assert _said(int, default="many") == '[bucketing.tiles] size = "many" (the default): must be a whole number.'


def test_a_default_is_refused_by_its_own_validator():
    assert _said(int, default=-1, validator=ge(0)) == "[bucketing.tiles] size = -1 (the default): must be >= 0."


def test_a_secret_is_not_shown():
    assert "***" in _said(int, default="many", metadata={"secret": True})


def test_a_default_that_a_converter_takes_may_be_of_another_type():
    _check(int, default="3", converter=int)


def test_a_required_value_has_no_default_to_check():
    _check(int, validator=ge(0))


@pytest.mark.parametrize("kind", [complex, complex | None, tuple[complex, ...], dict[str, complex], object])
def test_a_type_that_nobody_could_set_is_refused(kind):
    assert _said(kind).startswith("[bucketing.tiles] size: its type is ")


def test_a_nested_table_is_checked():
    outer = attrs.make_class(
        "Outer", {"inner": attrs.field(type=attrs.make_class("Inner", {"n": attrs.field(default="x", type=int)}))}
    )
    with pytest.raises(ConfigValueError, match=r'\[bucketing.tiles.inner\] n = "x" \(the default\)'):
        check_defaults(settings_of_table("bucketing.tiles", outer), "bucketing.tiles")
