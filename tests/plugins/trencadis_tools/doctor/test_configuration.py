from __future__ import annotations

import pytest

from trencadis.api import Registry, rules_or_defaults
from trencadis.config import read_config_file
from trencadis_tools.doctor.configuration import check_configuration


@pytest.fixture
def check(found, tmp_path):
    """Checks a file's text, flags and an environment against the schema without plugins."""

    def run(text=None, *, flags=(), environ=None):
        file = None
        if text is not None:
            file = tmp_path / "serve.toml"
            file.write_text(text)
        registry = Registry.discover(entry_points=())
        environ = environ or {}
        return check_configuration(found, registry, read_config_file(file, environ), list(flags), environ)

    return run


def wrong(found):
    return [item for item in found if item.severity.value == "fail"]


def test_values_are_counted_by_source_and_the_last_one_wins(found, told, check):
    check()
    resolved = check(
        "[engine]\nseed = 3\nmax_num_seqs = 7\n",
        flags=["--engine.seed=5", "--engine.warmup"],
        environ={"TRENCADIS_ENGINE__SEED": "4", "TRENCADIS_LOG__LEVEL": "error"},
    )
    counted = "valid values: 2 from flag, 1 from serve.toml, 1 from environment"
    assert told() == [("ok", "valid values: defaults only"), ("ok", counted)]
    assert (resolved.config.engine.seed, resolved.config.engine.max_num_seqs) == (5, 7)


def test_every_fault_of_every_source_is_found_in_one_go(found, check):
    resolved = check(
        "[engine]\nsed = 3\nmax_num_seqs = 0\nwarmup = false\n[modle]\npath = 'x'\n[plugins]\nblocked = 3\n",
        flags=["--engine.sead=5", "--engine.seed=many", "--engine.watchdog-s"],
        environ={"TRENCADIS_ENGINE__SEEED": "4"},
    )
    messages = " | ".join(item.message for item in wrong(found))
    for words in ("[engine] sed", "max_num_seqs", "[modle]", "TRENCADIS_ENGINE__SEEED", "--engine.sead", '"many"'):
        assert words in messages, words
    assert "--engine.watchdog-s: no value" in messages
    assert len(wrong(found)) == 8
    assert resolved.config.engine.warmup is False


def test_file_that_is_missing_or_no_toml_is_wrong_and_the_rest_is_still_read(found, check, tmp_path):
    resolved = check("[engine\n", flags=["--engine.seed=5"])
    assert "not valid TOML" in wrong(found)[0].message
    assert len(wrong(found)) == 1
    assert resolved.config.engine.seed == 5
    missing = read_config_file(tmp_path / "no.toml", {})
    check_configuration(found, Registry.discover(entry_points=()), missing, [], {})
    assert "no such config file" in wrong(found)[1].message


def test_file_named_by_the_environment_is_read(found, told, check, tmp_path):
    (tmp_path / "other.toml").write_text("[engine]\nseed = 3\n")
    assert check(environ={"TRENCADIS_CONFIG": str(tmp_path / "other.toml")}).config.engine.seed == 3


def test_variable_that_starts_like_ours_and_has_no_effect_is_doubtful_and_told_once(found, check, caplog):
    check(environ={"TRENCADIS_CONFG": "x", "TRENCADIS_BLOCKED_PLUGINS": "a", "OTHER": "y"})
    (doubt,) = [item for item in found if item.severity.value == "warn"]
    assert doubt.message == "environment TRENCADIS_CONFG: has no effect"
    assert doubt.remedy == 'Did you mean "TRENCADIS_CONFIG"?'
    assert not caplog.messages


def test_blocked_names_are_none_where_they_cannot_be_read(tmp_path):
    assert rules_or_defaults(read_config_file(None, {}), ["--plugins.blocked=a,b"], {}).blocked == ("a", "b")
    assert rules_or_defaults(read_config_file(tmp_path / "no.toml", {}), [], {}).blocked == ()
