from __future__ import annotations

import typing

import pytest

from trencadis.config import load_config, settings_of, settings_of_table
from trencadis.errors import ConfigError
from trencadis.hookspecs import NOUNS


def test_every_noun_has_a_table():
    assert set(settings_of().nouns) == set(NOUNS)


def test_a_field_gives_key_flag_and_environment_name(components):
    setting = settings_of(components).get("bucketing.tiles.limit")
    assert setting is not None
    assert (setting.table, setting.key) == ("bucketing.tiles", "limit")
    assert (setting.unit, setting.help) == ("tiles", "Most tiles.")


@pytest.mark.representatives(1)
@pytest.mark.parametrize("noun", ["kv_policy", "kv_connector", "kv_codec", "backend", "executor"])
def test_a_noun_whose_component_nothing_replaces_has_no_key_for_a_fallback(noun):
    assert settings_of().get(f"{noun}.fallback") is None
    with pytest.raises(ConfigError, match=rf"--{noun}.fallback: no such flag"):
        load_config(flags=[f"--{noun}.fallback=other"], environ={})


def test_no_two_settings_share_a_flag_or_a_variable(components):
    settings = list(settings_of(components))
    assert len({setting.flag for setting in settings}) == len(settings)
    assert len({setting.environment for setting in settings}) == len(settings)


def test_a_nested_config_class_is_a_table_of_its_own(components):
    setting = settings_of(components).get("bucketing.tiles.inner.depth")
    assert setting is not None
    assert setting.default == 1
    assert settings_of(components).get("bucketing.tiles.inner") is None


def test_every_setting_of_the_schema_says_what_it_means():
    assert [setting.path for setting in settings_of() if not setting.help] == []


def test_one_table_alone_is_as_it_is_among_all(components):
    alone = settings_of_table("bucketing.tiles", components["bucketing"]["tiles"])
    among = [setting for setting in settings_of(components) if setting.path.startswith("bucketing.tiles.")]
    assert list(alone) == among
    assert list(alone.tables()) == ["bucketing.tiles", "bucketing.tiles.inner"]


def test_annotations_are_resolved_once_for_all_catalogues(components, monkeypatch):
    """Each is compiled from its text; start-up asks for the catalogue several times."""
    settings_of(components)
    monkeypatch.setattr(typing, "get_type_hints", lambda *_: pytest.fail("resolved again"))
    settings_of(components)
