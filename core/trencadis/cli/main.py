"""From a command line to an exit code: choose the command, load plugins and configuration, run, print errors in words.

argv ▶ config file ▶ [plugins] blocked ▶ plugins ▶ command ▶ Registry ▶ config flags | the command's flags ▶ Config ▶ run
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import trencadis
from trencadis.cli.flags import CommandParser, config_file, set_aside_config_flags, spell_out
from trencadis.config import ConfigFile, Settings, load_config, plugin_rules, read_config_file, settings_of
from trencadis.config.check_sources import rules_or_defaults
from trencadis.config.sources import split_flags
from trencadis.errors import ConfigError, InternalError, PluginError, TrencadisError, did_you_mean
from trencadis.interfaces.command import Command
from trencadis.log import configure_logging, log_format
from trencadis.registry import Registry
from trencadis.registry.commands import InstalledCommands, installed_commands
from trencadis.registry.manager import PluginLoader

__all__ = ["COMMANDS", "INTERRUPTED", "all_commands", "main"]

COMMANDS: Mapping[str, Command] = {
    command.name: command
    for command in (
        Command(
            name="generate",
            summary="Continue prompts and print the texts.",
            load=partial(importlib.import_module, "trencadis.cli.generate_command"),
        ),
        Command(
            name="plugins",
            summary="List installed components: where each comes from, and which this configuration uses.",
            load=partial(importlib.import_module, "trencadis.cli.plugins_command"),
        ),
        Command(
            name="config",
            summary="Show every setting: its value, who set it, its unit and meaning.",
            load=partial(importlib.import_module, "trencadis.cli.config_command"),
        ),
    )
}
"""Commands of the core: they are found without plugins."""

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT, as shells do."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, an error's own (2 for a user's, 70 for a bug), or 130 after Ctrl-C.

    Args:
        argv: Arguments without the program's name; None: those of this process.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        _survive_signals()
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except TrencadisError as error:
        if "--traceback" in arguments:
            traceback.print_exc()
        else:
            _report(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader, such as `head`, has gone; what is still buffered must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        traceback.print_exc()
        print(f"error: a bug in Trencadís or in a plugin: {type(error).__name__}: {error}", file=sys.stderr)
        return InternalError.exit_code


def _survive_signals() -> None:
    """Let no command end at SIGUSR1, which prints the stacks of its threads, nor at SIGUSR2, which a command with engines handles."""
    if hasattr(signal, "SIGUSR1"):
        with contextlib.suppress(ValueError, OSError, AttributeError):  # without a stderr there is no place to print to
            faulthandler.register(signal.SIGUSR1, all_threads=True)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def _dispatch(arguments: list[str]) -> int:
    command = arguments[0] if arguments else "--help"
    if command in {"-h", "--help"}:
        print(_usage())
        return 0 if arguments else 2
    if command == "--version":
        print(f"trencadis {trencadis.__version__}")
        return 0
    file = _config_file(arguments[1:])
    if command in COMMANDS:
        return _run(COMMANDS[command], arguments[1:], file, None)
    plugins = _plugins(file, arguments[1:])
    return _run(_find(command, plugins), arguments[1:], file, plugins)


def all_commands(plugins: PluginLoader) -> InstalledCommands:
    """Return the commands of the core, then those of installed plugins.

    Args:
        plugins: The plugins, loaded.
    """
    found = installed_commands(COMMANDS, plugins)
    return InstalledCommands({**COMMANDS, **found.commands}, found.broken)


def _find(name: str, plugins: PluginLoader) -> Command:
    found = all_commands(plugins)
    if name not in found.commands:
        causes = " ".join(f"Commands of a plugin are left out: {error}" for error in found.broken.values())
        raise ConfigError(
            f'trencadis: no such command: "{name}". Choose one of: {", ".join(found.commands)}.'
            f"{did_you_mean(name, found.commands)}",
            hint=causes,
        )
    return found.commands[name]


def _config_file(arguments: Sequence[str]) -> ConfigFile:
    """Return the content of the configuration file, read here and nowhere else; the command itself says what is wrong with it."""
    try:
        return read_config_file(config_file(arguments))
    except ConfigError as error:
        return ConfigFile(error=error)


def _plugins(file: ConfigFile, arguments: Sequence[str]) -> PluginLoader:
    """Load the plugins; none is blocked where the configuration is wrong: the command itself says so."""
    return PluginLoader.of_installed(rules_or_defaults(file, arguments, os.environ).blocked)


def _usage() -> str:
    found = all_commands(_plugins(read_config_file(), ()))
    lines = ["usage: trencadis COMMAND [flags]", "", trencadis.__doc__.splitlines()[0] if trencadis.__doc__ else "", ""]
    lines += [f"  {command.name:10} {command.summary}" for command in found.commands.values()]
    lines += [f"\nwarning: commands of a plugin are left out: {error}" for error in found.broken.values()]
    return "\n".join(
        [*lines, "", "trencadis COMMAND --help lists a command's flags; trencadis --version prints the version."]
    )


def _report(message: str) -> None:
    """Print the error that ends a command, or log it where the log is for programs."""
    if log_format() == "text":
        print(f"error: {message}", file=sys.stderr)
    else:
        logging.getLogger("trencadis").error("%s", message)


def _run(command: Command, arguments: list[str], file: ConfigFile, plugins: PluginLoader | None) -> int:
    module: Any = command.load()
    arguments = spell_out(arguments, _short_flags(module))
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if "-h" in own or "--help" in own:
        parser = _parser(command, module, lambda: _settings_for_help(file, arguments, plugins))
        print(parser.format_help(), end="")
        return 0
    if hasattr(module, "run_alone"):
        return _run_alone(command, module, arguments, file, plugins)
    registry = _collect(file, arguments, plugins)
    settings = registry.settings
    with registry.naming_broken():
        flags, rest = split_flags(arguments, settings)
        args = _parser(command, module, lambda: settings).parse(rest)
        args.resolved = load_config(settings=settings, file=file, flags=flags)
    registry.note_sources(args.resolved.sources)
    configure_logging(args.resolved.config.log.level, args.resolved.config.log.format)
    if getattr(args, "locked", None):
        check_lock = importlib.import_module("trencadis.plan_lock").check_lock
        check_lock(args.locked, args.resolved.config, registry)
    code: int = module.run(args, args.resolved.config, registry)
    return code


def _collect(file: ConfigFile, arguments: Sequence[str], plugins: PluginLoader | None) -> Registry:
    """Return the registry of the plugins that were loaded to find the command; None: none were yet."""
    rules = plugin_rules(file=file, flags=arguments)
    if plugins is None or plugins.blocked != set(rules.blocked):  # a short form of a flag may block more
        plugins = PluginLoader.of_installed(rules.blocked)
    return Registry.of(plugins, strict=rules.strict)


def _run_alone(
    command: Command, module: Any, arguments: list[str], file: ConfigFile, plugins: PluginLoader | None
) -> int:
    """Run a command for which neither components nor configuration are loaded: it must work where they cannot be."""
    flags, rest = set_aside_config_flags(arguments) if _takes_config(module) else ([], arguments)
    args = _parser(command, module, settings_of).parse(rest)
    args.config_file, args.plugins = file, plugins
    code: int = module.run_alone(args, flags)
    return code


def _parser(command: Command, module: Any, settings: Callable[[], Settings]) -> CommandParser:
    parser = CommandParser(
        command.name,
        command.summary,
        settings if _takes_config(module) else None,
        short_flags=_short_flags(module),
        can_be_locked=_can_be_locked(module),
    )
    module.add_arguments(parser)
    return parser


def _takes_config(module: Any) -> bool:
    """Return whether a command reads the configuration. Pure."""
    return bool(getattr(module, "TAKES_CONFIG", True))


def _can_be_locked(module: Any) -> bool:
    """Return whether a command runs one configuration, which a lock file can fix. Pure."""
    return _takes_config(module) and not hasattr(module, "run_alone") and bool(getattr(module, "CAN_BE_LOCKED", True))


def _short_flags(module: Any) -> Mapping[str, str]:
    """Return the short forms of config flags that a command offers, if any. Pure."""
    own: Mapping[str, str] = getattr(module, "SHORT_FLAGS", {})
    return {**own, "--strict-plugins": "--plugins.strict"} if _takes_config(module) else own


def _settings_for_help(file: ConfigFile, arguments: Sequence[str], plugins: PluginLoader | None) -> Settings:
    """Return the settings to explain; without plugins' tables if they cannot be known, since help must always come."""
    try:
        registry = _collect(file, arguments, plugins)
    except (ConfigError, PluginError) as error:
        print(f"warning: flags of plugins are left out: {error}", file=sys.stderr)
        return settings_of()
    for item in registry.broken.values():
        print(f"warning: flags of a plugin are left out: {item.error}", file=sys.stderr)
    return registry.settings
