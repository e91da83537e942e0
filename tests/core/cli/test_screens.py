"""What commands print on a terminal of 80 columns: no line is longer, and no name is cut."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

import pytest

from support.terminal import Terminal, look_at
from trencadis.cli.help import MAIN_SETTINGS
from trencadis.cli.main import all_commands
from trencadis.registry import Registry
from trencadis.registry.manager import PluginLoader

COMMANDS = sorted(all_commands(PluginLoader.of_installed()).commands)


def screen(*arguments: str, status: int = 0) -> Terminal:
    """Return what a command shows, after checks that hold for each."""
    terminal = look_at([sys.executable, "-m", "trencadis", *arguments], env={"TRENCADIS_CONFIG": None})
    assert terminal.process.returncode == status, terminal.text
    assert terminal.wrapped == []
    assert "…" not in terminal.text
    return terminal


def names_in(lines: Sequence[str]) -> set[str]:
    return {word for line in lines for word in line.split()}


def test_plugins_show_each_name_whole_with_state_and_summary() -> None:
    terminal = screen("plugins")
    assert terminal.lines[0].split() == ["noun", "name", "state", "summary"]
    registry = Registry.discover()
    names = {name for noun in registry.nouns for name in registry.components(noun)}
    assert {"prefix_affinity", "simulated_store"} < names <= names_in(terminal.lines)


def test_wide_plugins_become_paragraphs_where_columns_do_not_fit() -> None:
    text = screen("plugins", "eviction", "--wide").text
    assert re.search(r"(?m)^s3_fifo$", text)
    assert "  stability: stable" in text
    assert "stable contracts: eviction" in text


def test_config_shows_every_key_whole_by_tables() -> None:
    terminal = screen("config")
    shown = set()
    table = ""
    for line in terminal.lines:
        if heading := re.fullmatch(r"\[([\w.-]+)\]", line):
            table = heading[1]
        elif line and not line.startswith(" "):
            shown.add(f"{table}.{line.split()[0]}")
    settings = {setting.path for setting in Registry.discover().settings}
    missing = settings - shown
    assert not missing


def test_doctor_shows_what_is_not_ok_and_a_count() -> None:
    terminal = screen("doctor", "--scheduling.name", "nope", status=1)
    assert not [line for line in terminal.lines if line.startswith("OK")]
    assert [line[:4] for line in terminal.lines if line[:4].strip().isupper()] == ["FAIL"]
    assert re.fullmatch(r"\d+ ok, \d+ doubtful, 1 wrong; trencadis doctor -v shows all\.", terminal.lines[-1])


def test_help_lists_every_command_in_groups_and_serve_first() -> None:
    terminal = screen("--help")
    indented = [line.split()[0] for line in terminal.lines if re.match(r"  \w", line)]
    assert sorted(indented) == COMMANDS
    assert indented[:2] == ["serve", "generate"]
    groups = [line for line in terminal.lines if re.fullmatch(r"[A-Z][\w ]+:", line)]
    assert groups == [
        "Run a model:",
        "See what is here:",
        "Operate and size:",
        "Measure and simulate:",
        "Write plugins:",
    ]


@pytest.mark.representatives(3)
@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command_is_as_wide_as_the_terminal(command: str) -> None:
    assert screen(command, "--help").lines[0].startswith(f"usage: trencadis {command}")


def test_help_of_serve_shows_thirty_flags_and_where_all_are() -> None:
    terminal = screen("serve", "--help")
    flags = [line.split()[0] for line in terminal.lines if re.match(r"  --[a-z_]+\.[a-z-]+$", line)]
    assert len(flags) == 30
    assert {"--model.path", "--server.port", "--server.api-keys", "--parallel.tensor"} <= set(flags)
    num_all = len(list(Registry.discover().settings))
    assert f"30 of {num_all} flags of the configuration; trencadis serve --help-all lists" in terminal.text


def test_the_settings_that_help_shows_exist() -> None:
    assert set(MAIN_SETTINGS) <= {setting.path for setting in Registry.discover().settings}
