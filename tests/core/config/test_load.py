from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trencadis.config import Config, load_config, plugin_rules
from trencadis.errors import ConfigValueError

SOURCES = ("file", "environment", "flag", "argument")
PATHS = {
    "engine.max_num_seqs": ("TRENCADIS_ENGINE__MAX_NUM_SEQS", "--engine.max-num-seqs", 256),
    "cache.num_blocks": ("TRENCADIS_CACHE__NUM_BLOCKS", "--cache.num-blocks", 0),
    "bucketing.tiles.limit": ("TRENCADIS_BUCKETING__TILES__LIMIT", "--bucketing.tiles.limit", 0),
}


def _read(config: Config, path: str) -> Any:
    table, *rest = path.split(".")
    found: Any = getattr(config, table)
    return getattr(found, rest[0]) if len(rest) == 1 else getattr(found.components[rest[0]], rest[1])


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(list(PATHS)), st.dictionaries(st.sampled_from(SOURCES), st.integers(1, 9999))))
def test_the_strongest_source_wins_and_is_named(components, tmp_path, chosen):
    file, environ, flags, overrides = tmp_path / "serve.toml", {}, [], {}
    lines = []
    for path, values in chosen.items():
        variable, flag, _ = PATHS[path]
        for source, value in values.items():
            if source == "file":
                table, _, key = path.rpartition(".")
                lines.append(f"[{table}]\n{key} = {value}\n")
            elif source == "environment":
                environ[variable] = str(value)
            elif source == "flag":
                flags += [flag, str(value)]
            else:
                overrides[path] = value
    file.write_text("".join(lines))
    resolved = load_config(components=components, file=file, environ=environ, flags=flags, overrides=overrides)
    for path, (variable, flag, default) in PATHS.items():
        values = chosen.get(path, {})
        strongest = next((source for source in reversed(SOURCES) if source in values), None)
        names = {
            "file": "serve.toml",
            "environment": f"environment {variable}",
            "flag": f"flag {flag}",
            "argument": "argument",
        }
        assert _read(resolved.config, path) == (values[strongest] if strongest else default)
        assert resolved.values[path] == (values[strongest] if strongest else default)
        assert resolved.sources[path] == (names[strongest] if strongest else "default")


def test_the_environment_can_name_the_file(tmp_path):
    file = tmp_path / "serve.toml"
    file.write_text("[engine]\nseed = 7\n")
    resolved = load_config(environ={"TRENCADIS_CONFIG": str(file)})
    assert (resolved.config.engine.seed, resolved.sources["engine.seed"]) == (7, "serve.toml")


def test_a_named_file_beats_the_environments(tmp_path):
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    first.write_text("[engine]\nseed = 1\n")
    second.write_text("[engine]\nseed = 2\n")
    assert load_config(file=second, environ={"TRENCADIS_CONFIG": str(first)}).config.engine.seed == 2


def test_the_process_environment_is_read_if_none_is_given(monkeypatch):
    monkeypatch.setenv("TRENCADIS_ENGINE__SEED", "11")
    assert load_config().config.engine.seed == 11


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"flags": ["--engine.max-num-seqs", "0"]},
            "[engine] max_num_seqs = 0 (from flag --engine.max-num-seqs): must be >= 1.",
        ),
        (
            {"flags": ["--engine.max-wait-s", "hot"]},
            '[engine] max_wait_s = "hot" (from flag --engine.max-wait-s): must be a number.',
        ),
        (
            {"environ": {"TRENCADIS_ENGINE__WARMUP": "yes"}},
            '[engine] warmup = "yes" (from environment TRENCADIS_ENGINE__WARMUP): must be true or false.',
        ),
        (
            {"overrides": {"cache.memory_fraction": 1.5}},
            "[cache] memory_fraction = 1.5 (from argument): must be > 0 and <= 1.",
        ),
        (
            {"overrides": {"log.level": "inof"}},
            '[log] level = "inof" (from argument): did you mean "info"? It must be one of: debug, info, warning, error.',
        ),
    ],
)
def test_a_wrong_value_names_key_value_source_and_what_is_allowed(arguments, message):
    with pytest.raises(ConfigValueError) as caught:
        load_config(**({"environ": {}} | arguments))
    assert str(caught.value) == message


def test_a_text_in_a_file_is_no_number(tmp_path):
    file = tmp_path / "serve.toml"
    file.write_text('[engine]\nseed = "3"\n')
    with pytest.raises(ConfigValueError) as caught:
        load_config(file=file, environ={})
    assert str(caught.value) == '[engine] seed = "3" (from serve.toml): must be a whole number.'


# --------------------------------------------------------------------------------------------- blocked plugins


def test_blocked_plugins_of_the_environment_are_added(tmp_path):
    file = tmp_path / "serve.toml"
    file.write_text('[plugins]\nblocked = ["a", "b"]\n')
    resolved = load_config(file=file, environ={"TRENCADIS_BLOCKED_PLUGINS": "b, c"})
    assert resolved.config.plugins.blocked == ("a", "b", "c")
    assert resolved.sources["plugins.blocked"] == "serve.toml, environment TRENCADIS_BLOCKED_PLUGINS"


@pytest.mark.parametrize(
    ("arguments", "blocked"),
    [
        ({"flags": ["--unknown.flag", "--plugins.blocked", "x,y", "--json"]}, ("x", "y")),
        ({"flags": ["--plugins.blocked=x"]}, ("x",)),
        ({"flags": ["--", "--plugins.blocked=x"]}, ()),
        ({"environ": {"TRENCADIS_PLUGINS__BLOCKED": "x", "TRENCADIS_NO__SUCH": "1"}}, ("x",)),
        ({"environ": {"TRENCADIS_BLOCKED_PLUGINS": "x"}, "flags": ["--plugins.blocked=y"]}, ("y", "x")),
        ({"overrides": {"plugins.blocked": ["x"], "no.such": 1}}, ("x",)),
        ({"overrides": {"plugins": 3}}, ()),
        ({}, ()),
    ],
)
def test_what_is_blocked_is_known_before_any_other_key_is(arguments, blocked):
    assert plugin_rules(**({"environ": {}} | arguments)).blocked == blocked


@pytest.mark.parametrize(
    ("arguments", "strict"),
    [
        ({"flags": ["--plugins.strict", "--json"]}, True),
        ({"flags": ["--plugins.strict", "words", "--plugins.blocked", "x"]}, True),
        ({"flags": ["--plugins.strict", "false"]}, False),
        ({"flags": ["--plugins.strict=true"]}, True),
        ({"environ": {"TRENCADIS_PLUGINS__STRICT": "true"}}, True),
        ({"overrides": {"plugins.strict": True}}, True),
        ({}, False),
    ],
)
def test_whether_plugins_are_strict_is_known_before_any_other_key_is(arguments, strict):
    assert plugin_rules(**({"environ": {}} | arguments)).strict is strict


def test_the_file_can_block_before_its_other_tables_are_understood(tmp_path):
    file = tmp_path / "serve.toml"
    file.write_text('[plugins]\nblocked = ["x"]\n[bucketing.not_loaded_yet]\nlimit = 3\n')
    assert plugin_rules(file=file, environ={}).blocked == ("x",)


def test_a_blocked_value_of_another_type_is_refused():
    environ = {"TRENCADIS_BLOCKED_PLUGINS": "a"}
    with pytest.raises(ConfigValueError, match=r"\[plugins\] blocked = 3 \(from argument\): must be a list of text"):
        plugin_rules(environ=environ, overrides={"plugins.blocked": 3})


@pytest.mark.parametrize("path", ["", " "])
def test_a_model_without_a_name_is_refused(path):
    with pytest.raises(ConfigValueError) as caught:
        load_config(environ={}, flags=[f"--model.path={path}"])
    assert str(caught.value) == (
        f'[model] path = "{path}" (from flag --model.path): must name a model: a directory, a .gguf file, a hub id, or "demo".'
    )
