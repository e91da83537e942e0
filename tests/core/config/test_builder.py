from __future__ import annotations

import attrs
import pytest

from trencadis.config import load_config
from trencadis.errors import ConfigValueError, UnknownKeyError


def _load(components, overrides):
    return load_config(components=components, environ={}, overrides=overrides).config


def _said(components, overrides, error_type=ConfigValueError):
    with pytest.raises(error_type) as caught:
        _load(components, overrides)
    return str(caught.value)


def test_a_nested_table_is_built(components):
    config = _load(components, {"bucketing.tiles.inner.depth": 7, "bucketing.tiles.weights": {"a": 2}})
    assert config.bucketing.components["tiles"].inner.depth == 7
    assert config.bucketing.components["tiles"].weights == {"a": 2.0}


def test_a_component_whose_required_value_is_missing_is_left_out_unless_named(components):
    assert dict(_load(components, {}).kv_connector.components) == {}
    assert _said(components, {"kv_connector.name": "store"}) == (
        '[kv_connector.store] url: no value, and the kv_connector component "store" (from argument) needs one. '
        "Set it in the config file, with --kv_connector.store.url or with TRENCADIS_KV_CONNECTOR__STORE__URL."
    )


def test_a_components_own_validator_keeps_its_words(components):
    overrides = {"kv_connector.store": {"url": "x", "tries": 4}}
    assert _said(components, overrides) == (
        "[kv_connector.store] tries = 4 (from argument): more than 3 tries need policy eager."
    )


def test_an_error_never_shows_a_secret(components):
    assert _said(components, {"kv_connector.store.url": 12345}) == (
        "[kv_connector.store] url = *** (from argument): must be text."
    )


def test_a_class_that_raises_on_its_own_account_names_its_table_and_sources():
    @attrs.frozen(kw_only=True)
    class Moody:
        mood: str = "good"

        def __attrs_post_init__(self):
            if self.mood == "bad":
                raise RuntimeError("not today")

    assert _said({"eviction": {"moody": Moody}}, {"eviction.moody.mood": "bad"}) == (
        "[eviction.moody] (from argument): not today."
    )


def test_a_class_that_raises_in_our_words_is_left_alone():
    @attrs.frozen(kw_only=True)
    class Polite:
        mood: str = "good"

        def __attrs_post_init__(self):
            if self.mood == "bad":
                raise ConfigValueError("please, not today.")

    assert _said({"eviction": {"polite": Polite}}, {"eviction.polite.mood": "bad"}) == "please, not today."


def test_options_reach_the_component_given_by_import_path(components):
    overrides = {"scheduling": {"name": "a.b:Policy", "options": {"limit": 3}}}
    assert _load(components, overrides).scheduling.components == {"a.b:Policy": {"limit": 3}}


def test_options_as_text_are_read_as_toml_where_they_are_toml():
    flags = [
        "--scheduling.name=a:B",
        "--scheduling.options.limit=12",
        "--scheduling.options.tag=red",
        "--scheduling.options.on",
    ]
    config = load_config(environ={}, flags=[*flags, "true"]).config
    assert config.scheduling.components["a:B"] == {"limit": 12, "tag": "red", "on": True}


def test_options_without_an_import_path_are_refused(components):
    said = _said(components, {"bucketing.options.limit": 3}, UnknownKeyError)
    assert said == (
        "[bucketing.options] (from argument): only a component given by import path takes options, and [bucketing] names "
        "auto, exact. Write a component's own keys in its table, [bucketing.NAME]."
    )


def test_options_that_could_belong_to_two_components_are_refused(components):
    said = _said(components, {"observer": {"names": ["a:B", "c:D"], "options": {"x": 1}}}, UnknownKeyError)
    assert said.startswith("[observer.options] (from argument): they could belong to any of: a:B, c:D.")
