from __future__ import annotations

from pathlib import Path

import pytest

from trencadis.cli.flags import CommandParser, config_file, set_aside_config_flags, spell_out
from trencadis.cli.help import MAIN_SETTINGS, config_flags_help
from trencadis.config import settings_of
from trencadis.errors import ConfigError


@pytest.fixture
def parser():
    parser = CommandParser("make", "Makes.", settings_of)
    parser.add_argument("--num-tiles", type=int, default=1)
    return parser


def _said(call, *arguments):
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    return str(caught.value)


def test_a_commands_own_flags_are_parsed(parser):
    args = parser.parse(["--num-tiles", "3", "--config", "a.toml"])
    assert (args.num_tiles, args.config, args.traceback) == (3, Path("a.toml"), False)


def test_an_unknown_flag_is_refused_with_a_suggestion(parser):
    assert _said(parser.parse, ["--num-tile", "3"]) == (
        'trencadis make: unknown argument --num-tile. Did you mean "--num-tiles"? trencadis make --help lists the flags.'
    )


def test_a_wrong_value_is_an_error_in_words_and_no_exit(parser):
    assert "argument --num-tiles: invalid int value: 'many'" in _said(parser.parse, ["--num-tiles", "many"])


def test_help_lists_the_config_flags_that_matter_most(parser):
    text = parser.format_help()
    assert {setting.path for setting in settings_of() if f"  {setting.flag}\n" in text} == set(MAIN_SETTINGS)
    assert "trencadis make --help-all lists all." in text


def test_all_help_lists_every_config_flag(parser):
    parser.show_all()
    text = parser.format_help()
    assert all(setting.flag in text for setting in settings_of())
    assert "--num-tiles" in text


def test_help_says_what_a_flag_takes():
    text = " ".join(config_flags_help(settings_of()).split())
    assert (
        "--engine.max-num-seqs Most sequences running at once. (a whole number >= 1, sequences; default: 256)" in text
    )


@pytest.mark.parametrize(
    ("line", "file"),
    [
        (["--config", "a.toml", "--engine.seed", "3"], Path("a.toml")),
        (["hello", "--config=a.toml"], Path("a.toml")),
        (["--", "--config", "a.toml"], None),
        (["--conf", "a.toml"], None),
        ([], None),
    ],
)
def test_the_config_file_is_known_before_all_other_flags(line, file):
    assert config_file(line) == file


def test_a_config_flag_without_a_file_is_refused():
    assert _said(config_file, ["--config"]).endswith("Write --config FILE.")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["x", "--size", "3", "y"], ["x", "y"]), (["--size", "3", "--", "--y"], ["--y"]), (["--size", "3"], [])],
)
def test_words_may_stand_on_both_sides_of_flags(arguments: list[str], words: list[str]) -> None:
    parser = CommandParser("sample", "Samples.", settings_of)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--size", type=int)
    parsed = parser.parse(arguments)
    assert (parsed.words, parsed.size) == (words, 3)


SHORT = {"--port": "--server.port", "--host": "--server.host"}


@pytest.mark.parametrize(
    ("line", "spelt"),
    [
        (["--port", "3"], ["--server.port", "3"]),
        (["--port=3", "x", "--host", "a=b"], ["--server.port=3", "x", "--server.host", "a=b"]),
        (["--ports", "3"], ["--ports", "3"]),
        (["--", "--port", "3"], ["--", "--port", "3"]),
        ([], []),
    ],
)
def test_short_forms_become_the_config_flags_they_stand_for(line, spelt):
    assert spell_out(line, SHORT) == spelt


def test_short_forms_are_in_the_help_and_in_suggestions():
    parser = CommandParser("make", "Makes.", settings_of, short_flags=SHORT)
    assert "--port VALUE  short for --server.port" in parser.format_help()
    assert 'Did you mean "--port"?' in _said(parser.parse, ["--prot", "3"])


@pytest.mark.parametrize(
    ("line", "flags", "rest"),
    [
        (["--a.b=3", "word", "--json"], ["--a.b=3"], ["word", "--json"]),
        (["--a.b", "3", "word"], ["--a.b=3"], ["word"]),
        (["--a.b", "--json"], ["--a.b"], ["--json"]),
        (["word", "--a.b"], ["--a.b"], ["word"]),
        (["--", "--a.b", "3"], [], ["--", "--a.b", "3"]),
    ],
)
def test_config_flags_are_set_aside_without_knowing_which_there_are(line, flags, rest):
    assert set_aside_config_flags(line) == (flags, rest)


def test_a_command_that_is_not_configured_has_no_config_flags():
    parser = CommandParser("make", "Makes.", None)
    assert "--engine.seed" not in parser.format_help()
    assert "unknown argument --config" in _said(parser.parse, ["--config", "x"])
