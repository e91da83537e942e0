"""Commands of plugins: found without a registry; a broken plugin hides its own only."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable

import pytest

from support.only_installed import only_installed
from trencadis.errors import ComponentConflictError, ContractError, PluginLoadError
from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Command
from trencadis.registry.commands import installed_commands
from trencadis.registry.manager import PluginLoader


def plugin(name: str, offer: Callable[[], list[object]]) -> types.ModuleType:
    """Return a plugin that offers commands."""
    module = types.ModuleType(name)
    module.trencadis_commands = hookimpl(specname="trencadis_commands")(offer)
    return module


def command(name: str, loaded: list[str] | None = None) -> Command:
    """Return a command that notes when it is loaded."""

    def load() -> types.ModuleType:
        assert loaded is not None
        loaded.append(name)
        return types.ModuleType(name)

    return Command(name=name, summary=f"Does {name}.", load=load)


def test_commands_are_found_and_none_is_loaded(monkeypatch):
    loaded: list[str] = []
    offered = [command("replay", loaded), command("look-up", loaded)]
    only_installed(monkeypatch, [plugin("first", lambda: offered), types.ModuleType("second")])
    found = installed_commands((), PluginLoader.of_installed())
    assert list(found.commands.values()) == offered
    assert (found.broken, loaded) == ({}, [])


def test_a_blocked_plugin_is_not_asked(monkeypatch):
    only_installed(monkeypatch, [plugin("first", lambda: [command("replay")])])
    assert installed_commands((), PluginLoader.of_installed({"first"})).commands == {}


def test_a_broken_plugin_hides_its_own_commands_only(monkeypatch):
    def raising() -> list[object]:
        raise ZeroDivisionError("no")

    modules = [
        plugin("breaks", raising),
        plugin("confused", lambda: ["replay"]),
        plugin("greedy", lambda: [command("fine"), command("generate")]),
        plugin("later", lambda: [command("replay")]),
        plugin("twin", lambda: [command("replay")]),
    ]
    only_installed(monkeypatch, modules)
    found = installed_commands({"generate"}, PluginLoader.of_installed())
    assert list(found.commands) == ["replay"]
    assert {name: type(error) for name, error in found.broken.items()} == {
        "breaks": PluginLoadError,
        "confused": ContractError,
        "greedy": ComponentConflictError,
        "twin": ComponentConflictError,
    }
    assert "raised in trencadis_commands: ZeroDivisionError: no" in str(found.broken["breaks"])
    assert 'plugin "later"' in str(found.broken["twin"])
    assert 'plugin "twin"' in str(found.broken["twin"])


def test_standard_output_is_left_to_the_command(monkeypatch, capsys):
    def speaking() -> list[object]:
        sys.stdout.write("hello\n")
        return [command("replay")]

    only_installed(monkeypatch, [plugin("speaks", speaking)])
    assert list(installed_commands((), PluginLoader.of_installed()).commands) == ["replay"]
    assert capsys.readouterr() == ("", "hello\n")


@pytest.mark.parametrize("name", ["", "Replay", "re play", "-r", "re.play"])
def test_a_name_that_cannot_be_typed_is_refused(name):
    with pytest.raises(ValueError, match="command name"):
        command(name)
