from __future__ import annotations

import logging
from typing import ClassVar

import attrs
import pytest

from trencadis.config import load_config
from trencadis.config.aliases import truth
from trencadis.errors import ConfigValueError


def _halved(text):
    return int(text) // 2


def _unless_default(text):
    return attrs.NOTHING if text == "default" else text


@attrs.frozen(kw_only=True)
class PlainConfig:
    """Table ``[bucketing.plain]``: aliases of every form."""

    size: int = attrs.field(default=1, metadata={"aliases": "OTHER_SIZE"})
    width: int = attrs.field(default=1, metadata={"aliases": ("OTHER_WIDTH", "OLDER_WIDTH")})
    half: int = attrs.field(default=1, metadata={"aliases": {"OTHER_WHOLE": _halved}})
    switch: bool = attrs.field(default=False, metadata={"aliases": ["OTHER_SWITCH"]})
    word: str = attrs.field(default="", metadata={"aliases": {"OTHER_WORD": _unless_default}})


@attrs.frozen(kw_only=True)
class TwinConfig:
    """Table ``[bucketing.twin]``: shares a name with the other."""

    size: int = attrs.field(default=1, metadata={"aliases": ("OTHER_SIZE",)})


COMPONENTS = {"bucketing": {"plain": PlainConfig, "twin": TwinConfig}}


def load(environ, **more):
    return load_config(components=COMPONENTS, environ=environ, **more)


def plain(environ, **more):
    return load(environ, **more).config.bucketing.components["plain"]


@pytest.mark.parametrize(
    ("environ", "values"),
    [
        ({"OTHER_SIZE": "7"}, {"size": 7}),
        ({"OLDER_WIDTH": "5"}, {"width": 5}),
        ({"OTHER_WHOLE": "10"}, {"half": 5}),
        ({"OTHER_SWITCH": "Y"}, {"switch": True}),
        ({"OTHER_SWITCH": "off"}, {"switch": False}),
        ({"OTHER_WORD": "default"}, {"word": ""}),
        ({"OTHER_SIZE": ""}, {"size": 1}),
    ],
)
def test_components_field_declares_what_its_alias_means(environ, values):
    assert plain(environ) == attrs.evolve(PlainConfig(), **values)


def test_one_name_sets_every_setting_that_declares_it():
    components = load({"OTHER_SIZE": "7"}).config.bucketing.components
    assert (components["plain"].size, components["twin"].size) == (7, 7)


@attrs.frozen(kw_only=True)
class WideConfig:
    """Table ``[backend.wide]``: names for settings of other tables."""

    other_aliases: ClassVar = {
        "engine.warmup": {"OTHER_NO_WARMUP": lambda text: not truth(text)},
        "bucketing.name": {"OTHER_FIRST": lambda text: "exact" if text == "0" else attrs.NOTHING, "OTHER_SECOND": None},
        "bucketing.absent.key": {"OTHER_ABSENT": None},
    }


WIDE = {**COMPONENTS, "backend": {"wide": WideConfig}}


def test_a_component_declares_names_for_settings_of_other_tables():
    resolved = load_config(components=WIDE, environ={"OTHER_NO_WARMUP": "1", "OTHER_FIRST": "1", "OTHER_ABSENT": "1"})
    assert resolved.config.engine.warmup is False
    assert resolved.sources["engine.warmup"] == "environment OTHER_NO_WARMUP"
    assert (resolved.values["bucketing.name"], resolved.sources["bucketing.name"]) == ("auto", "default")


def test_file_is_weaker_and_flag_and_argument_are_stronger(tmp_path):
    file = tmp_path / "serve.toml"
    file.write_text("[bucketing.plain]\nsize = 2\n")
    environ = {"OTHER_SIZE": "3"}
    assert plain(environ, file=file).size == 3
    assert plain(environ, file=file, flags=["--bucketing.plain.size", "4"]).size == 4
    assert plain(environ, file=file, overrides={"bucketing.plain.size": 5}).size == 5


def test_own_name_wins_and_the_alias_is_reported_once(caplog):
    environ = {"TRENCADIS_ENGINE__WARMUP": "true", "OTHER_NO_WARMUP": "true"}
    with caplog.at_level(logging.WARNING, logger="trencadis"):
        resolved = load_config(components=WIDE, environ=environ)
    assert resolved.config.engine.warmup is True
    assert resolved.sources["engine.warmup"] == "environment TRENCADIS_ENGINE__WARMUP"
    said = "OTHER_NO_WARMUP=true is ignored for engine.warmup: environment TRENCADIS_ENGINE__WARMUP is set too."
    assert [record.getMessage() for record in caplog.records] == [said]


def test_stronger_of_two_aliases_wins_and_the_other_is_reported(caplog):
    environ = {"OTHER_FIRST": "0", "OTHER_SECOND": "plain"}
    with caplog.at_level(logging.WARNING, logger="trencadis"):
        assert load_config(components=WIDE, environ=environ).config.bucketing.name == "exact"
    said = "OTHER_SECOND=plain is ignored for bucketing.name: environment OTHER_FIRST says otherwise."
    assert [record.getMessage() for record in caplog.records] == [said]


def test_aliases_that_agree_are_not_reported(caplog):
    with caplog.at_level(logging.WARNING, logger="trencadis"):
        both = {"OTHER_WIDTH": "4", "OLDER_WIDTH": "4"}
        assert plain(both, overrides={"bucketing.name": "plain"}).width == 4
    assert not caplog.records


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (
            {"OTHER_NO_WARMUP": "perhaps"},
            '[engine] warmup = "perhaps" (from environment OTHER_NO_WARMUP): must be true or false (also: ',
        ),
        (
            {"OTHER_SIZE": "big"},
            '[bucketing.plain] size = "big" (from environment OTHER_SIZE): must be a whole number.',
        ),
        ({"OTHER_WHOLE": "x"}, '[bucketing.plain] half = "x" (from environment OTHER_WHOLE): invalid literal'),
    ],
)
def test_text_without_a_meaning_is_refused_with_name_and_value(environ, said):
    with pytest.raises(ConfigValueError) as caught:
        load_config(components=WIDE, environ=environ)
    assert str(caught.value).startswith(said)


@attrs.frozen(kw_only=True)
class SizesConfig:
    """Table ``[bucketing.sizes]``: bucket sizes under the names of other software."""

    smallest: int = attrs.field(default=1, metadata={"aliases": "OTHER_PROMPT_MIN"})
    largest: int = attrs.field(default=1, metadata={"aliases": "OTHER_PROMPT_MAX"})


@attrs.frozen(kw_only=True)
class DeviceConfig:
    """Table ``[backend.device]``: reads one of these names, too, and knows the family."""

    alias_families: ClassVar = {r"OTHER_PROMPT_\w+": "bucket size"}

    most: int = attrs.field(default=1, metadata={"aliases": "OTHER_PROMPT_MAX"})


SIZED = {"bucketing": {"sizes": SizesConfig, "plain": PlainConfig}, "backend": {"device": DeviceConfig}}
MIN_IS_FOR = "OTHER_PROMPT_MIN=2 is for the bucketing sizes only; [bucketing] name is "


@pytest.mark.parametrize(
    ("environ", "overrides", "said"),
    [
        ({"OTHER_PROMPT_MIN": "2"}, {}, [f"{MIN_IS_FOR}auto."]),
        ({"OTHER_PROMPT_MIN": "2"}, {"bucketing.name": "plain"}, [f"{MIN_IS_FOR}plain."]),
        ({"OTHER_PROMPT_MIN": "2"}, {"bucketing.name": "sizes"}, []),
        ({"OTHER_PROMPT_MIN": "2"}, {"bucketing.fallback": "sizes"}, []),
        # somebody else's setting makes it
        ({"OTHER_PROMPT_MIN": "2"}, {"bucketing.sizes.smallest": 3}, []),
        # the backend reads it
        ({"OTHER_PROMPT_MAX": "2"}, {}, []),
        (
            {"OTHER_PROMPT_MXA": "2"},
            {},
            ["OTHER_PROMPT_MXA=2 has no effect: there is no such bucket size. "
             'Did you mean "OTHER_PROMPT_MAX"?'],
        ),
    ],
)  # fmt: skip
def test_bucket_size_that_nobody_reads_is_reported(caplog, environ, overrides, said):
    with caplog.at_level(logging.WARNING, logger="trencadis"):
        load_config(components=SIZED, environ=environ, overrides=overrides)
    assert caplog.messages == said


@pytest.mark.parametrize(("text", "value"), [("T", True), (" on ", True), ("1", True), ("F", False), ("No", False)])
def test_truth_is_written_in_many_ways(text, value):
    assert truth(text) is value
