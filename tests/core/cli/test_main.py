from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import types

import pytest

import trencadis
from trencadis.cli import main as run_main
from trencadis.cli.main import all_commands
from trencadis.errors import ConfigError, InternalError
from trencadis.interfaces import Command
from trencadis.registry.manager import PluginLoader


def offered(name: str, summary: str, module: types.ModuleType) -> Command:
    return Command(name=name, summary=summary, load=lambda: module)


@pytest.fixture
def command(monkeypatch, installed):
    """A command of the test, ``trencadis try``; returns what its ``run`` was called with."""
    calls: list[tuple[object, object, object]] = []

    def run(args, config, registry):
        calls.append((args, config, registry))
        if args.fail:
            raise {
                "config": ConfigError,
                "internal": InternalError,
                "ctrl-c": KeyboardInterrupt,
                "pipe": BrokenPipeError,
                "crash": ZeroDivisionError,
            }[args.fail]("it broke.")
        return 7

    def add_arguments(parser):
        parser.add_argument("words", nargs="*")
        parser.add_argument("--fail", default="")

    module = types.ModuleType("try_command")
    module.add_arguments, module.run = add_arguments, run
    monkeypatch.setitem(sys.modules, "try_command", module)
    monkeypatch.setattr(sys.modules["trencadis.cli.main"], "COMMANDS", {"try": offered("try", "Tries.", module)})
    return calls


def test_a_command_is_run_with_its_arguments_config_and_registry(command):
    assert (
        run_main(
            ["try", "one", "--engine.seed", "3", "two", "--engine.warmup", "--bucketing.exponential.exact", "--", "--x"]
        )
        == 7
    )
    ((args, config, registry),) = command
    assert args.words == ["one", "two", "--x"]
    assert config.engine.seed == 3
    assert config.bucketing.components["exponential"].exact is True
    assert args.resolved.config is config
    assert args.resolved.sources["engine.seed"] == "flag --engine.seed" == registry.sources["engine.seed"]


def test_an_error_is_printed_in_words_with_its_exit_code(command, capsys):
    assert run_main(["try", "--fail", "config"]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "error: it broke.\n")


def test_a_traceback_is_shown_on_demand_and_the_exit_code_is_the_same(command, capsys):
    assert run_main(["try", "--fail", "config", "--traceback"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback (most recent call last):")
    assert "ConfigError: it broke." in shown


def test_a_crash_shows_where_it_happened_and_ends_as_a_bug_does(command, capsys):
    assert run_main(["try", "--fail", "crash"]) == InternalError.exit_code == 70
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback (most recent call last):")
    assert shown.endswith("error: a bug in Trencadís or in a plugin: ZeroDivisionError: it broke.\n")


def test_ctrl_c_ends_with_130(command):
    assert run_main(["try", "--fail", "ctrl-c"]) == 130


@pytest.fixture
def lone_command(monkeypatch, installed):
    """A command of the test that needs nothing loaded; returns what it was called with."""
    calls = []
    module = types.ModuleType("lone_command")
    module.add_arguments = lambda parser: parser.add_argument("--json", action="store_true")
    module.run_alone = lambda args, flags: calls.append((args, flags)) or 5
    monkeypatch.setitem(sys.modules, "lone_command", module)
    monkeypatch.setattr(
        sys.modules["trencadis.cli.main"], "COMMANDS", {"lone": offered("lone", "Works alone.", module)}
    )
    return module, calls


@pytest.mark.usefixtures("broken_plugin")
def test_a_command_that_works_alone_loads_neither_plugins_nor_configuration(lone_command, tmp_path):
    _, calls = lone_command
    file = str(tmp_path / "no.toml")
    assert run_main(["lone", "--config", file, "--engine.sed", "3", "--json", "--engine.warmup"]) == 5
    ((args, flags),) = calls
    assert (str(args.config), args.json, flags) == (file, True, ["--engine.sed=3", "--engine.warmup"])


def test_a_command_that_is_not_configured_refuses_config_flags(lone_command, capsys):
    module, calls = lone_command
    module.TAKES_CONFIG = False
    assert run_main(["lone", "--engine.seed", "3"]) == 2
    assert "unknown argument --engine.seed" in capsys.readouterr().err
    assert calls == []


def test_the_version_is_printed(capsys):
    assert run_main(["--version"]) == 0
    assert capsys.readouterr().out == f"trencadis {trencadis.__version__}\n"


def test_help_lists_the_commands_with_their_summaries(command, capsys):
    assert run_main(["--help"]) == 0
    assert re.search(r"(?m)^Other:\n  try  +Tries\.$", capsys.readouterr().out)


def test_without_a_command_help_is_shown_and_the_exit_code_is_2(command, capsys):
    assert run_main([]) == 2
    assert "usage: trencadis COMMAND" in capsys.readouterr().out


def test_an_unknown_command_is_refused_with_a_suggestion(capsys):
    assert run_main(["plugin"]) == 2
    assert capsys.readouterr().err == (
        f'error: trencadis: no such command: "plugin". Did you mean "plugins"? Choose one of: {", ".join(all_commands(PluginLoader.of_installed()).commands)}.\n'
    )


def test_help_of_a_command_lists_its_flags_and_all_those_of_plugins_on_demand(command, capsys):
    assert run_main(["try", "--help"]) == 0
    out = capsys.readouterr().out
    assert "--fail" in out
    assert "--engine.seed" in out
    assert "--bucketing.exponential.limit" not in out
    assert run_main(["try", "--help-all"]) == 0
    out = capsys.readouterr().out
    assert "--fail" in out
    assert "--bucketing.exponential.limit" in out
    assert command == []


@pytest.mark.usefixtures("broken_plugin")
def test_help_comes_even_if_a_plugin_is_broken(command, capsys):
    assert run_main(["try", "--help-all"]) == 0
    captured = capsys.readouterr()
    assert "--engine.seed" in captured.out
    assert "--bucketing.exponential.limit" in captured.out
    assert captured.err.startswith('warning: flags of a plugin are left out: broken, given in code (plugin "broken")')


def test_help_after_two_dashes_is_a_word(command):
    assert run_main(["try", "--", "--help"]) == 7


@pytest.mark.usefixtures("broken_plugin")
def test_a_flag_blocks_a_broken_plugin(command, capsys):
    assert run_main(["try", "--strict-plugins"]) == 2
    assert 'plugin "broken"' in capsys.readouterr().err
    assert run_main(["try", "--strict-plugins", "--plugins.blocked", "broken"]) == 7


@pytest.mark.usefixtures("broken_plugin")
def test_a_flag_of_a_broken_plugin_is_explained_by_it(command, capsys):
    assert run_main(["try", "--bucketing.spiral.limit", "3"]) == 2
    error = capsys.readouterr().err
    assert "--bucketing.spiral.limit: no such flag." in error
    assert 'Perhaps it is of a plugin that cannot be used: broken, given in code (plugin "broken") defines' in error


@pytest.mark.representatives(1)
@pytest.mark.parametrize("arguments", [["plugins"], ["config"], ["--version"]])
def test_looking_around_imports_no_tensor_library(arguments):
    code = f"""
import sys
from trencadis.cli import main
assert main({arguments!r}) == 0
sys.exit(3 if {{"torch", "transformers"}} & set(sys.modules) else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr


@pytest.mark.parametrize("argument", ["config", "--version"])
def test_a_reader_that_goes_away_is_no_error(argument):
    line = [sys.executable, "-m", "trencadis", argument]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0


def test_a_short_form_sets_the_value_it_stands_for_and_its_source_is_the_long_one(command):
    sys.modules["try_command"].SHORT_FLAGS = {"--seed": "--engine.seed"}
    assert run_main(["try", "--seed", "1234"]) == 7
    args, config, _ = command[0]
    assert config.engine.seed == 1234
    assert args.resolved.sources["engine.seed"] == "flag --engine.seed"


@pytest.mark.skipif(not hasattr(signal, "SIGUSR2"), reason="this system has no such signals")
def test_no_command_ends_at_the_signals_of_operators(tmp_path):
    """A command that waits for its config file, a pipe, gets both and then goes on."""
    pipe = tmp_path / "serve.toml"
    os.mkfifo(pipe)
    command = subprocess.Popen(
        [sys.executable, "-m", "trencadis", "config", "--config", str(pipe)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with pipe.open("w") as config:  # opens once the command reads
        command.send_signal(signal.SIGUSR1)
        command.send_signal(signal.SIGUSR2)
        config.write("[engine]\nseed = 4321\n")
    out, err = command.communicate(timeout=60)
    assert command.returncode == 0, err
    assert "4321" in out


@pytest.mark.parametrize(
    ("flags", "is_terminal", "expected"),
    [
        ([], False, ("info", "info")),
        ([], True, ("info", "warning")),
        (["-v"], True, ("info", "info")),
        (["-vv"], False, ("debug", "debug")),
        (["--log.level", "error"], True, ("error", "error")),
        (["-v", "--log.level=info"], True, ("info", "info")),
        (["-vv", "--log.level=error"], True, ("error", "error")),
    ],
)
def test_the_log_of_a_command_on_a_terminal_is_quieter_unless_it_is_asked_for(
    command, monkeypatch, flags, is_terminal, expected
):
    main = sys.modules["trencadis.cli.main"]
    shown: list[tuple[str, str]] = []
    monkeypatch.setattr(main, "configure_logging", lambda level, form, *, loading: shown.append((level, loading)))
    monkeypatch.setattr(main, "on_terminal", lambda: is_terminal)
    monkeypatch.setattr(sys.modules["try_command"], "TERMINAL_LOG_LEVELS", ("info", "warning"), raising=False)
    assert run_main(["try", *flags]) == 7
    assert shown == [expected]
