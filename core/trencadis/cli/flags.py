"""The parser of one command: its own flags by argparse, the configuration's flags by the catalogue of settings.

Values of config flags stay text until they are merged with the other sources, so that each keeps its source and errors
name the flag (docs/decisions/0003). argparse therefore never sees them. A command may have short forms of config flags, such
as ``--port`` for ``--server.port``: they become the long ones before anything else is parsed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from trencadis.cli.help import MAIN_SETTINGS, HelpFormatter, config_flags_help, short_flags_help
from trencadis.cli.spelling import clear_keys
from trencadis.config import Settings
from trencadis.config.sources import is_config_flag
from trencadis.errors import ConfigError, did_you_mean

__all__ = ["DEFAULT_LOCK", "HELP_ALL", "LOCKED", "CommandParser", "config_file", "set_aside_config_flags", "spell_out"]

HELP_ALL = "--help-all"
LOCKED = "--locked"
DEFAULT_LOCK = "trencadis.lock"


class CommandParser(argparse.ArgumentParser):
    """An argument parser that explains config flags in its help and raises :class:`ConfigError` instead of exiting.

    Args:
        command: Name of the command.
        summary: Summary of the command.
        settings: Makes the catalogue of settings; called only for help. None: the command takes no configuration.
        short_flags: Config flag of each short form that the command has.
        main_settings: Settings that its help shows beside those of :data:`trencadis.cli.help.MAIN_SETTINGS`.
        can_be_locked: The command resolves a plan, which a lock file can fix.
    """

    def __init__(
        self,
        command: str,
        summary: str,
        settings: Callable[[], Settings] | None,
        *,
        short_flags: Mapping[str, str] | None = None,
        main_settings: Sequence[str] = (),
        can_be_locked: bool = False,
    ) -> None:
        super().__init__(
            prog=f"trencadis {command}", description=summary, allow_abbrev=False, formatter_class=HelpFormatter
        )
        self._settings = settings
        self._short_flags = dict(short_flags or {})
        self._main_settings = frozenset({*MAIN_SETTINGS, *main_settings})
        self._shows_all = False
        if settings is not None:
            self.add_argument(HELP_ALL, action="help", help="show this help with every flag of the configuration")
            self.add_argument("--config", metavar="FILE", type=Path, help="config file, TOML; else TRENCADIS_CONFIG")
        if can_be_locked:
            self.add_argument(
                LOCKED,
                nargs="?",
                const=Path(DEFAULT_LOCK),
                type=Path,
                metavar="=FILE",
                help=f"refuse to run unless plugins, versions, files and options are those of this lock file (default: {DEFAULT_LOCK})",
            )
        self.add_argument("--traceback", action="store_true", help="show where an error was raised")

    def format_help(self) -> str:
        """Return argparse's help, followed by the short flags and by the config flags that matter most; all after :meth:`show_all`."""
        if self._settings is None:
            return super().format_help()
        settings = self._settings()
        parts = [super().format_help(), short_flags_help(self._short_flags, settings)]
        if self._shows_all:
            parts.append(config_flags_help(settings))
        else:
            parts.append(config_flags_help(settings, only=self._main_settings, all_of=f"{self.prog} {HELP_ALL}"))
        return "\n".join(f"{part.rstrip()}\n" for part in parts if part)

    def show_all(self) -> None:
        """Have the help list every config flag."""
        self._shows_all = True

    def own_flags(self) -> list[str]:
        """Return all spellings of the flags that the command itself has. Pure."""
        return [flag for action in self._actions for flag in action.option_strings]

    def error(self, message: str) -> NoReturn:
        """Raise the error that argparse found.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(f"{self.prog}: {message}.", hint=f"{self.prog} --help lists the flags.")

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse what config flags left over.

        Raises:
            ConfigError: An unknown flag, with a suggestion, or a missing or wrong value.
        """
        # Its value is optional, and the word after it is not meant for it.
        arguments = [f"{LOCKED}={DEFAULT_LOCK}" if word == LOCKED else word for word in arguments]
        # Words may stand on both sides of flags; after "--", which the intermixed parser does not know, all are words.
        parse = self.parse_known_args if "--" in arguments else self.parse_known_intermixed_args
        known, unknown = parse(arguments)
        if unknown:
            flags = [*self._short_flags, *self.own_flags()]
            flags += [] if self._settings is None else clear_keys(self._settings())
            raise ConfigError(
                f"{self.prog}: unknown argument {unknown[0]}.{did_you_mean(unknown[0], flags)}",
                hint=f"{self.prog} --help lists the flags.",
            )
        return known


def spell_out(arguments: Sequence[str], short_flags: Mapping[str, str]) -> list[str]:
    """Return a command line with long config flags in place of short ones; what follows ``--`` is left alone. Pure."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    spelt = []
    for argument in arguments[:end]:
        name, equals, value = argument.partition("=")
        spelt.append(f"{short_flags.get(name, name)}{equals}{value}")
    return [*spelt, *arguments[end:]]


def set_aside_config_flags(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return a command line's config flags, and the rest, without knowing which settings there are. Pure.

    A flag without ``=`` takes the word after it, unless that is a flag itself.
    """
    flags: list[str] = []
    rest: list[str] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        if word == "--":
            return flags, [*rest, word, *words]
        if not is_config_flag(word):
            rest.append(word)
        elif "=" not in word and words and not words[0].startswith("--"):
            flags.append(f"{word}={words.pop(0)}")
        else:
            flags.append(word)
    return flags, rest


def config_file(arguments: Sequence[str]) -> Path | None:
    """Return what ``--config`` names, before the whole command line can be understood. Pure.

    Raises:
        ConfigError: The flag has no value.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", type=Path)
    before = list(arguments[: arguments.index("--")]) if "--" in arguments else list(arguments)
    try:
        found: Path | None = parser.parse_known_args(before)[0].config
    except argparse.ArgumentError as error:
        raise ConfigError(f"trencadis: {error}.", hint="Write --config FILE.") from error
    return found
