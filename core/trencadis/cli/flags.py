"""The parser of one command: its own flags by argparse, the configuration's flags by the catalogue of settings.

Values of config flags stay text until they are merged with the other sources, so that each keeps its source and errors
name the flag (docs/decisions/0003). argparse therefore never sees them.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import attrs

from trencadis.config import Settings
from trencadis.config.messages import show
from trencadis.config.reference import describe
from trencadis.errors import ConfigError, did_you_mean

__all__ = ["CommandParser", "config_file"]


class CommandParser(argparse.ArgumentParser):
    """An argument parser that explains config flags in its help and raises :class:`ConfigError` instead of exiting.

    Args:
        command: Name of the command.
        summary: What it does.
        settings: Makes the catalogue of settings; called only for help.
    """

    def __init__(self, command: str, summary: str, settings: Callable[[], Settings]) -> None:
        super().__init__(prog=f"trencadis {command}", description=summary, allow_abbrev=False)
        self._settings = settings
        self.add_argument("--config", metavar="FILE", type=Path, help="config file, TOML; else TRENCADIS_CONFIG")
        self.add_argument("--traceback", action="store_true", help="show where an error was raised")

    def format_help(self) -> str:
        """Return argparse's help, followed by every config flag."""
        return f"{super().format_help()}\n{config_flags_help(self._settings())}"

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
        # Words may stand on both sides of flags; behind "--", which the intermixed parser does not know, all are words.
        parse = self.parse_known_args if "--" in arguments else self.parse_known_intermixed_args
        known, unknown = parse(arguments)
        if unknown:
            flags = [flag for action in self._actions for flag in action.option_strings]
            raise ConfigError(
                f"{self.prog}: unknown argument {unknown[0]}.{did_you_mean(unknown[0], flags)}",
                hint=f"{self.prog} --help lists the flags.",
            )
        return known


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


def config_flags_help(settings: Settings) -> str:
    """Return the section of ``--help`` on config flags. Pure."""
    lines = ["configuration (each also in the config file and the environment; see trencadis config --explain):"]
    for setting in settings:
        default = "required" if setting.default is attrs.NOTHING else f"default: {show(setting.default)}"
        unit = f", {setting.unit}" if setting.unit else ""
        lines.append(f"  {setting.flag}")
        text = f"{setting.help} ({describe(setting)}{unit}; {default})".strip()
        lines.extend(textwrap.wrap(text, width=100, initial_indent=" " * 8, subsequent_indent=" " * 8))
    return "\n".join(lines) + "\n"
