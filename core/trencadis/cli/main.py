"""From a command line to an exit code: choose the command, load plugins and configuration, run, print errors in words.

argv ▶ config file ▶ [plugins] blocked ▶ plugins ▶ command ▶ Registry ▶ config flags | the command's flags ▶ Config ▶ run
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import faulthandler
import functools
import importlib
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import trencadis
from trencadis.cli.flags import HELP_ALL, CommandParser, config_file, set_aside_config_flags, spell_out
from trencadis.cli.help import commands_help
from trencadis.cli.spelling import refuse_foreign_flags, whole_flags
from trencadis.config import ConfigFile, Settings, load_config, plugin_rules, read_config_file, settings_of
from trencadis.config.load import rules_or_defaults
from trencadis.config.messages import DEFAULT
from trencadis.config.sources import split_flags
from trencadis.console import on_terminal
from trencadis.errors import ConfigError, InternalError, PluginError, TrencadisError, did_you_mean
from trencadis.interfaces.command import Command, CommandGroup
from trencadis.log import configure_logging, say
from trencadis.other_engines import Command as ForeignCommand
from trencadis.other_engines import commands
from trencadis.registry import Registry
from trencadis.registry.commands import InstalledCommands, installed_commands
from trencadis.registry.manager import PluginLoader
from trencadis.registry.mentions import mentions_in
from trencadis.registry.startup import completed, find_placement
from trencadis.saved_help import keep
from trencadis.startup import LEDGER, claim_process, is_own_process, rare_collections

__all__ = ["COMMANDS", "INTERRUPTED", "add_arguments_of", "all_commands", "main"]

COMMANDS: Mapping[str, Command] = {
    command.name: command
    for command in (
        Command(
            name="generate",
            summary="Continue prompts and print the texts.",
            group=CommandGroup.RUNNING,
            load=partial(importlib.import_module, "trencadis.cli.generate_command"),
        ),
        Command(
            name="run",
            summary='Answer one prompt: run MODEL "...".',
            group=CommandGroup.RUNNING,
            load=partial(importlib.import_module, "trencadis.cli.run_command"),
        ),
        Command(
            name="chat",
            summary="Converse with a model on the terminal.",
            group=CommandGroup.RUNNING,
            load=partial(importlib.import_module, "trencadis.cli.chat_command"),
        ),
        Command(
            name="plugins",
            summary="List installed components: where each comes from, and which this configuration uses.",
            group=CommandGroup.LOOKING,
            load=partial(importlib.import_module, "trencadis.cli.plugins_command"),
        ),
        Command(
            name="config",
            summary="Show every setting: its value, who set it, its unit and meaning.",
            group=CommandGroup.LOOKING,
            load=partial(importlib.import_module, "trencadis.cli.config_command"),
        ),
    )
}
"""Commands of the core: they are found without plugins."""

_SHORT_FLAGS = {"--model": "--model.path", "-m": "--model.path", "--strict-plugins": "--plugins.strict"}
"""Short forms that every command has which takes the configuration."""

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT, as shells do."""


class _Terminated(KeyboardInterrupt):
    """SIGTERM came: everything is closed as after Ctrl-C."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, an error's own (2 for a user's, 70 for a bug), or 130 after Ctrl-C.

    Args:
        argv: Arguments without the program's name; None: those of this process.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        claim_process()
        LEDGER.begin("command")
        _survive_signals()
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except TrencadisError as error:
        if "--traceback" in arguments:
            traceback.print_exc()
        else:
            say(f"error: {error}", logging.ERROR)
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        is_terminated = isinstance(interrupt, _Terminated)
        say(f"trencadis {arguments[0]} was stopped by {'SIGTERM' if is_terminated else 'Ctrl-C'}.")
        code = 128 + signal.SIGTERM if is_terminated else INTERRUPTED
        if argv is None:
            _leave_behind_threads(code)
        return code
    except BrokenPipeError:
        # The reader, such as `head`, has gone; what is still buffered must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        traceback.print_exc()
        print(f"error: a bug in Trencadís or in a plugin: {type(error).__name__}: {error}", file=sys.stderr)
        return InternalError.exit_code


def _leave_behind_threads(code: int) -> None:
    """End the process without waiting for threads that still run, such as one that loads a model."""
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        atexit._run_exitfuncs()  # noqa: SLF001 - Python itself calls it after it has waited for all threads
        sys.stdout.flush()
        os._exit(code)


def _survive_signals() -> None:
    """Let no command end at SIGUSR1, which prints the stacks of its threads, nor at SIGUSR2, which a command with engines handles.

    At SIGTERM a command ends as after Ctrl-C, in order and with a line that says so; at a second one at once.
    """
    if hasattr(signal, "SIGUSR1"):
        with contextlib.suppress(ValueError, OSError, AttributeError):  # without a stderr there is no place to print to
            faulthandler.register(signal.SIGUSR1, all_threads=True)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)

    came: list[int] = []

    def terminate(number: int, frame: object) -> None:
        came.append(number)
        if len(came) > 1:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        raise _Terminated  # it stays the handler: faults.reraise_interrupt looks for it in the traceback

    signal.signal(signal.SIGTERM, terminate)


def _dispatch(arguments: list[str]) -> int:
    command = arguments[0] if arguments else "--help"
    if command in {"-h", "--help"}:
        text = _usage()
        print(text)
        if is_own_process():
            keep(text)
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
    if name not in found.commands and plugins.load_rest():
        found = all_commands(plugins)
    if name not in found.commands:
        foreign = commands().get(name)
        if foreign is not None:
            raise ConfigError(f"trencadis: {name} is a command of other engines. {_does_it(foreign)}")
        causes = " ".join(f"Commands of a plugin are left out: {error}" for error in found.broken.values())
        raise ConfigError(
            f'trencadis: no such command: "{name}".{did_you_mean(name, found.commands)} '
            f"Choose one of: {', '.join(found.commands)}.",
            hint=causes,
        )
    return found.commands[name]


def _does_it(foreign: ForeignCommand) -> str:
    """Return what does here what a command of another engine does. Pure."""
    if not foreign.ours:
        return f"Here {foreign.said}."
    note = f" ({foreign.said})" if foreign.note else ""
    return f"Here it is {foreign.ours}{note}."


def _config_file(arguments: Sequence[str]) -> ConfigFile:
    """Return the content of the configuration file, read here and nowhere else; the command itself says what is wrong with it."""
    try:
        return read_config_file(config_file(arguments))
    except ConfigError as error:
        return ConfigFile(error=error)


def _plugins(file: ConfigFile, arguments: Sequence[str]) -> PluginLoader:
    """Load the plugins; none is blocked where the configuration is wrong: the command itself says so."""
    blocked = rules_or_defaults(file, arguments, os.environ).blocked
    with rare_collections():
        return PluginLoader.of_installed(blocked, mentions=mentions_in(file, flags=arguments))


def _usage() -> str:
    plugins = _plugins(read_config_file(), ())
    plugins.load_rest()
    found = all_commands(plugins)
    # Commands of plugins come first within a group, so that serve begins the list.
    ordered = {name: one for name, one in found.commands.items() if name not in COMMANDS} | dict(COMMANDS)
    return commands_help(ordered, [str(error) for error in found.broken.values()])


def _run(command: Command, arguments: list[str], file: ConfigFile, plugins: PluginLoader | None) -> int:
    with rare_collections():
        module: Any = command.load()
    own = _parser(command, module, settings_of).own_flags()
    arguments = spell_out(arguments, {flag: long for flag, long in _short_flags(module).items() if flag not in own})
    before = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if {"-h", "--help", HELP_ALL}.intersection(before):
        parser = _parser(command, module, lambda: _settings_for_help(file, arguments, plugins))
        if HELP_ALL in before:
            parser.show_all()
        print(parser.format_help(), end="")
        return 0
    if hasattr(module, "run_alone"):
        return _run_alone(command, module, arguments, file, plugins)
    name = f"trencadis {command.name}"
    registry, arguments = _whole(file, arguments, plugins, own=own if _takes_config(module) else None, name=name)
    if getattr(module, "NEEDS_ALL_PLUGINS", True) or any(word.startswith("--locked") for word in arguments):
        registry.complete()

    def parse() -> argparse.Namespace:
        settings = registry.settings
        flags, rest = split_flags(arguments, settings)
        if _takes_config(module):
            refuse_foreign_flags(rest, own, lambda: settings, command=name)
        args = _parser(command, module, lambda: settings).parse(rest)
        flags += _model_flag(module, args, flags, name)
        args.resolved = load_config(settings=settings, file=file, flags=flags)
        return args

    args = completed(registry, parse)
    registry.sources = args.resolved.sources
    find_placement(registry, args.resolved.config.engine.placement)
    level, loading = _log_levels(module, args)
    configure_logging(level, args.resolved.config.log.format, loading=loading)
    if getattr(args, "locked", None):
        registry.hooks.check_lock(args.locked, args.resolved.config, registry)
    code: int = module.run(args, args.resolved.config, registry)
    return code


def _model_flag(module: Any, args: argparse.Namespace, flags: Sequence[str], name: str) -> list[str]:
    """Return the config flag that a given argument MODEL stands for."""
    model = args.model if _takes_model(module) else None
    if model is None:
        return []
    given = [flag.partition("=")[2] for flag in flags if flag.startswith("--model.path=")]
    if given:
        raise ConfigError(
            f'{name}: the model is given twice: "{model}" and --model.path {given[0]}.', hint="Leave out one."
        )
    return [f"--model.path={model}"]


def _collect(file: ConfigFile, arguments: Sequence[str], plugins: PluginLoader | None) -> Registry:
    """Return the registry of the plugins that were loaded to find the command; None: none were yet."""
    rules = plugin_rules(file=file, flags=arguments)
    with rare_collections():
        if plugins is None or plugins.blocked != set(rules.blocked):  # a short form of a flag may block more
            plugins = PluginLoader.of_installed(rules.blocked, mentions=mentions_in(file, flags=arguments))
        return Registry.of(plugins, strict=rules.strict)


def _whole(
    file: ConfigFile, arguments: list[str], plugins: PluginLoader | None, *, own: Collection[str] | None, name: str
) -> tuple[Registry, list[str]]:
    """Return the registry, and the command line with whole config flags; ``own`` is None where a command takes none."""
    registry = _collect(file, arguments, plugins)
    if own is None:
        return registry, arguments
    with registry.left_out.naming_broken():
        whole = whole_flags(arguments, own, lambda: _all_settings(registry), command=name)
    if plugin_rules(file=file, flags=whole) != plugin_rules(file=file, flags=arguments):
        return _collect(file, whole, None), whole
    return registry, whole


def _all_settings(registry: Registry) -> Settings:
    """Return the settings of all plugins: a key is in one table only if it is in no other."""
    registry.complete()
    return registry.settings


def _run_alone(
    command: Command, module: Any, arguments: list[str], file: ConfigFile, plugins: PluginLoader | None
) -> int:
    """Run a command for which neither components nor configuration are loaded: it must work where they cannot be."""
    flags: list[str] = []
    rest = arguments
    if _takes_config(module):
        own, name = _parser(command, module, settings_of).own_flags(), f"trencadis {command.name}"
        settings = functools.cache(lambda: _settings_for_help(file, arguments, plugins))
        flags, rest = set_aside_config_flags(whole_flags(arguments, own, settings, command=name))
        refuse_foreign_flags(rest, own, settings, command=name)
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
        main_settings=getattr(module, "MAIN_SETTINGS", ()),
        can_be_locked=_can_be_locked(module),
    )
    add_arguments_of(module, parser)
    return parser


def add_arguments_of(module: Any, parser: argparse.ArgumentParser) -> None:
    """Add all arguments of a command but the flags of the configuration.

    Args:
        module: The command's.
        parser: Gets them.
    """
    if _takes_model(module):
        parser.add_argument(
            "model", nargs="?", metavar="MODEL", help="directory, .gguf file or hub id: short for --model.path"
        )
    module.add_arguments(parser)
    if hasattr(module, "TERMINAL_LOG_LEVELS"):
        parser.add_argument("-v", "--verbose", action="count", default=0, help="log what happens; -vv: every detail")


def _log_levels(module: Any, args: argparse.Namespace) -> tuple[str, str]:
    """Return the level of the log, and the level while an engine loads: a configured level, else that of ``-v``, else the command's own."""
    level, is_set = args.resolved.config.log.level, args.resolved.sources["log.level"] != DEFAULT
    verbose = getattr(args, "verbose", 0) if hasattr(module, "TERMINAL_LOG_LEVELS") else 0
    if is_set or not (verbose or on_terminal()):
        return level, level
    if verbose:
        return ("info", "info") if verbose == 1 else ("debug", "debug")
    own: tuple[str, str] = getattr(module, "TERMINAL_LOG_LEVELS", (level, level))
    return own


def _takes_model(module: Any) -> bool:
    """Return whether a command's first argument names the model. Pure."""
    return bool(getattr(module, "TAKES_MODEL", False))


def _takes_config(module: Any) -> bool:
    """Return whether a command reads the configuration. Pure."""
    return bool(getattr(module, "TAKES_CONFIG", True))


def _can_be_locked(module: Any) -> bool:
    """Return whether a command runs one configuration, which a lock file can fix. Pure."""
    return _takes_config(module) and not hasattr(module, "run_alone") and bool(getattr(module, "CAN_BE_LOCKED", True))


def _short_flags(module: Any) -> Mapping[str, str]:
    """Return the short forms of config flags that a command offers, if any. Pure."""
    own: Mapping[str, str] = getattr(module, "SHORT_FLAGS", {})
    return {**own, **_SHORT_FLAGS} if _takes_config(module) else own


def _settings_for_help(file: ConfigFile, arguments: Sequence[str], plugins: PluginLoader | None) -> Settings:
    """Return the settings to explain; without plugins' tables if they cannot be known, since help must always come."""
    try:
        registry = _collect(file, arguments, plugins)
    except (ConfigError, PluginError) as error:
        print(f"warning: flags of plugins are left out: {error}", file=sys.stderr)
        return settings_of()
    for item in registry.broken.values():
        print(f"warning: flags of a plugin are left out: {item.error}", file=sys.stderr)
    return _all_settings(registry)
