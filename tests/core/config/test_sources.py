from __future__ import annotations

import sys

import pytest

from trencadis.config import settings_of
from trencadis.config.sources import (
    from_environment,
    from_flags,
    from_tree,
    is_config_flag,
    nest,
    read_file,
    split_flags,
)
from trencadis.errors import ConfigError, ConfigValueError, UnknownKeyError


@pytest.fixture
def settings(components):
    return settings_of(components)


def _said(error_type, call, *arguments):
    with pytest.raises(error_type) as caught:
        call(*arguments)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------------- files


@pytest.mark.representatives(10)
@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("nope.toml", None, "no such config file. Correct --config or TRENCADIS_CONFIG."),
        (".", None, "cannot be read: "),
        ("a.toml", b"\xff\xfe\x00", "cannot be read: "),
        ("a.toml", b'[engine]\nseed = "open\n', "not valid TOML: Illegal character '\\n' (at line 2, column 13)"),
        ("a.yaml", b"engine:\n  seed: [1\n", "not valid YAML: "),
        ("a.yaml", b"- 1\n- 2\n", "holds no tables"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_the_place_and_what_to_do(tmp_path, name, content, said):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert _said(ConfigError, read_file, tmp_path / name).startswith(f"{tmp_path / name}: {said}")


def test_yaml_gives_the_same_tables_as_toml(tmp_path):
    pytest.importorskip("yaml")
    (tmp_path / "a.yaml").write_text("bucketing:\n  name: tiles\n  tiles: {limit: 3, colours: [red]}\n")
    (tmp_path / "a.toml").write_text('[bucketing]\nname = "tiles"\n[bucketing.tiles]\nlimit = 3\ncolours = ["red"]\n')
    assert read_file(tmp_path / "a.yaml") == read_file(tmp_path / "a.toml")
    (tmp_path / "empty.yml").write_text("")
    assert read_file(tmp_path / "empty.yml") == {}


def test_yaml_without_pyyaml_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    file = tmp_path / "a.yaml"
    file.write_text("")
    assert "pip install pyyaml" in _said(ConfigError, read_file, file)


# ------------------------------------------------------------------------------------------------------- trees


def test_tables_become_dotted_paths(settings):
    given = from_tree({"engine": {"seed": 1}, "bucketing": {"tiles": {"inner": {"depth": 2}}}}, settings, "serve.toml")
    assert {item.path: (item.raw, item.source) for item in given} == {
        "engine.seed": (1, "serve.toml"),
        "bucketing.tiles.inner.depth": (2, "serve.toml"),
    }


def test_a_value_that_is_a_table_stays_whole(settings):
    (given,) = from_tree({"bucketing": {"tiles": {"weights": {"a": 1}}}}, settings, "serve.toml")
    assert (given.path, given.raw) == ("bucketing.tiles.weights", {"a": 1})


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (
            {"embedding": {"poling": "last"}},
            "[embedding] poling (from serve.toml): no such key. "
            'Did you mean "pooling"? The table has: pooling, normalize.',
        ),
        (
            {"plugins": {"x": 1}},
            "[plugins] x (from serve.toml): no such key. The table has: blocked, strict, experimental.",
        ),
        (
            {"bucketing": {"tiels": {"limit": 1}}},
            '[bucketing.tiels] (from serve.toml): no such component. Did you mean "tiles"? Choose one of: tiles.',
        ),
        (
            {"eviction": {"lru": {"a": 1}}},
            "[eviction.lru] (from serve.toml): no such component. No plugin offers any.",
        ),
        (
            {"bucketing": {"tiles": {"limt": 1}}},
            "[bucketing.tiles] limt (from serve.toml): no such key. "
            'Did you mean "limit"? The table has: limit, ratio, shape, mode, colours, file, weights.',
        ),
    ],
)
def test_an_unknown_key_names_file_and_table_and_suggests(settings, tree, message):
    assert _said(UnknownKeyError, from_tree, tree, settings, "serve.toml") == message


def test_an_unknown_table_lists_the_tables(settings):
    said = _said(UnknownKeyError, from_tree, {"enigne": {"seed": 1}}, settings, "serve.toml")
    assert said.startswith(
        '[enigne] (from serve.toml): no such table. Did you mean "engine"? The tables are: model, engine, '
    )


def test_a_value_where_a_table_belongs_is_refused(settings):
    assert _said(ConfigValueError, from_tree, {"bucketing": {"tiles": 3}}, settings, "serve.toml") == (
        "[bucketing] tiles = 3 (from serve.toml): must be a table: write [bucketing.tiles] and its keys below."
    )


# ------------------------------------------------------------------------------------------------- environment


def test_variables_of_other_programs_are_left_alone(settings):
    ours = {"TRENCADIS_CONFIG": "x.toml", "TRENCADIS_BLOCKED_PLUGINS": "a", "TRENCADIS_HOME": "/opt", "PATH": "/bin"}
    assert from_environment(ours, settings) == []


def test_an_unknown_variable_is_refused_with_a_suggestion(settings):
    said = _said(UnknownKeyError, from_environment, {"TRENCADIS_ENGINE__SEDE": "1"}, settings)
    assert said == (
        'environment TRENCADIS_ENGINE__SEDE: no such setting. Did you mean "TRENCADIS_ENGINE__SEED"? '
        "trencadis config --explain lists every setting."
    )


def test_one_underscore_too_few_is_noticed(settings):
    said = _said(UnknownKeyError, from_environment, {"TRENCADIS_ENGINE_MAX_NUM_SEQS": "1"}, settings)
    assert said == (
        'environment TRENCADIS_ENGINE_MAX_NUM_SEQS: no such setting. Did you mean "TRENCADIS_ENGINE__MAX_NUM_SEQS"?'
    )


# ------------------------------------------------------------------------------------------------------- flags


@pytest.mark.parametrize(
    ("token", "is_one"),
    [("--engine.seed", True), ("--engine.seed=3", True), ("--prompt=a.b", False), ("--json", False), ("a.b", False)],
)
def test_a_config_flag_has_a_dot_in_its_name(token, is_one):
    assert is_config_flag(token) is is_one


def test_config_flags_are_split_from_the_rest(settings):
    line = ["hello", "--engine.seed", "3", "--json", "--log.level=info", "--engine.max-wait-s", "-1", "world"]
    assert split_flags(line, settings) == (
        ["--engine.seed=3", "--log.level=info", "--engine.max-wait-s=-1"],
        ["hello", "--json", "world"],
    )


def test_a_boolean_flag_may_stand_alone(settings):
    line = [
        "--engine.warmup",
        "hello",
        "--model.trust-remote-code",
        "--cache.prefix-caching",
        "false",
        "--engine.warmup",
    ]
    assert split_flags(line, settings) == (
        [
            "--engine.warmup=true",
            "--model.trust-remote-code=true",
            "--cache.prefix-caching=false",
            "--engine.warmup=true",
        ],
        ["hello"],
    )


def test_what_follows_two_dashes_is_no_flag(settings):
    assert split_flags(["--", "--engine.seed", "3"], settings) == ([], ["--", "--engine.seed", "3"])


@pytest.mark.parametrize("line", [["--engine.seed"], ["--engine.seed", "--json"]])
def test_a_flag_without_its_value_is_refused(settings, line):
    assert _said(ConfigError, split_flags, line, settings) == "flag --engine.seed: no value. Write --engine.seed=VALUE."


@pytest.mark.parametrize("line", [["--engine.sede", "3"], ["--engine.sede=3"]])
def test_an_unknown_flag_is_refused_with_a_suggestion(settings, line):
    assert _said(UnknownKeyError, from_flags, line, settings) == (
        'flag --engine.sede: no such flag. Did you mean "--engine.seed"? trencadis config --flags lists all of them.'
    )


def test_dashes_and_underscores_of_a_flag_are_the_same(settings):
    (given,) = from_flags(["--kv-connector.store.tries=2"], settings)
    assert (given.path, given.source) == ("kv_connector.store.tries", "flag --kv_connector.store.tries")


def test_only_config_flags_are_taken_for_them(settings):
    assert "'hello' is no config flag" in _said(ConfigError, from_flags, ["hello"], settings)


# ------------------------------------------------------------------------------------------------------ Python


def test_dotted_paths_and_nested_tables_mix():
    assert nest({"engine.seed": 1, "engine": {"warmup": False}, "bucketing.tiles.limit": 2}) == {
        "engine": {"seed": 1, "warmup": False},
        "bucketing": {"tiles": {"limit": 2}},
    }


def test_keys_of_a_mapping_that_is_a_value_are_no_paths():
    assert nest({"bucketing.tiles.weights": {"a.b": 1}}) == {"bucketing": {"tiles": {"weights": {"a.b": 1}}}}


def test_the_callers_mappings_are_left_alone():
    table = {"seed": 1}
    nest({"engine": table, "engine.warmup": False})
    assert table == {"seed": 1}


@pytest.mark.parametrize("overrides", [{"engine": 3, "engine.seed": 1}, {"engine.seed": 1, "engine": 3}])
def test_a_path_through_a_value_is_refused(overrides):
    with pytest.raises(ConfigError, match="leads through engine"):
        nest(overrides)
