"""What ``--help`` prints: commands in groups, and of the configuration's flags those that most deployments set, or all."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import attrs

import trencadis
from trencadis.config import Settings
from trencadis.config.messages import show
from trencadis.config.reference import describe
from trencadis.interfaces.command import Command, CommandGroup

__all__ = ["MAIN_SETTINGS", "HelpFormatter", "commands_help", "config_flags_help", "short_flags_help"]

MAIN_SETTINGS: tuple[str, ...] = (
    "model.path",
    "model.tokenizer",
    "model.dtype",
    "model.max_model_len",
    "model.trust_remote_code",
    "engine.max_num_seqs",
    "engine.max_num_batched_tokens",
    "engine.seed",
    "engine.warmup",
    "parallel.tensor",
    "parallel.pipeline",
    "parallel.data",
    "cache.num_blocks",
    "cache.memory_fraction",
    "cache.prefix_caching",
    "scheduling.name",
    "bucketing.name",
    "speculation.name",
    "kv_connector.name",
    "backend.name",
    "log.level",
)
"""Settings of the core that most deployments set; a command adds its own, see :class:`~trencadis.interfaces.Command`."""

_MOST_COLUMNS = 100
_INDENT = " " * 8


class HelpFormatter(argparse.HelpFormatter):
    """Writes a usage line of the words that a command takes; its flags, which argparse does not wrap where they exclude each other, are listed below."""

    def _format_usage(
        self, usage: str | None, actions: Iterable[argparse.Action], groups: Any, prefix: str | None
    ) -> str:
        words = [action for action in actions if not action.option_strings]
        prog, self._prog = self._prog, f"{self._prog} [flags]"
        try:
            return super()._format_usage(usage, words, [], prefix)
        finally:
            self._prog = prog


def commands_help(commands: Mapping[str, Command], warnings: Sequence[str]) -> str:
    """Return what ``trencadis --help`` prints, as wide as the terminal.

    Args:
        commands: By name; those of a group keep their order.
        warnings: Errors of plugins whose commands are left out.
    """
    width = max(len(name) for name in commands) + 4
    about = (trencadis.__doc__ or "").partition("\n")[0]
    lines = ["usage: trencadis COMMAND [flags]", "", *_wrapped(about)]
    for group in CommandGroup:
        if not any(command.group is group for command in commands.values()):
            continue
        lines += ["", f"{group}:"]
        for command in commands.values():
            if command.group is group:
                first = f"  {command.name}".ljust(width)
                lines += _wrapped(command.summary, first=first, rest=" " * width)
    for warning in warnings:
        lines += ["", *_wrapped(f"warning: commands of a plugin are left out: {warning}")]
    last = "trencadis COMMAND --help lists a command's flags; trencadis --version prints the version."
    return "\n".join([*lines, "", *_wrapped(last)])


def short_flags_help(short_flags: Mapping[str, str], settings: Settings) -> str:
    """Return the section of ``--help`` on short forms of config flags; empty if there are none."""
    if not short_flags:
        return ""
    switches = {setting.flag for setting in settings if setting.type is bool}
    lines = ["short forms of config flags:"]
    for flag, long in short_flags.items():
        lines += _wrapped(f"{flag}{'' if long in switches else ' VALUE'}  short for {long}", first="  ", rest=_INDENT)
    return "\n".join(lines) + "\n"


def config_flags_help(settings: Settings, *, only: Collection[str] | None = None, all_of: str = "") -> str:
    """Return the section of ``--help`` on config flags, as wide as the terminal.

    Args:
        settings: The catalogue.
        only: Dotted paths of the settings to show; None: all.
        all_of: Command line that shows all of them, for the last line; empty: no such line.
    """
    lines = _wrapped("configuration (each also in the config file and the environment; see trencadis config):")
    shown = [setting for setting in settings if only is None or setting.path in only]
    for setting in shown:
        default = "required" if setting.default is attrs.NOTHING else f"default: {show(setting.default)}"
        unit = f", {setting.unit}" if setting.unit else ""
        lines.append(f"  {setting.flag}")
        lines += _wrapped(f"{setting.help} ({describe(setting)}{unit}; {default})".strip(), first=_INDENT, rest=_INDENT)
    if all_of:
        num_all = sum(1 for _ in settings)
        lines += ["", *_wrapped(f"{len(shown)} of {num_all} flags of the configuration; {all_of} lists all.")]
    return "\n".join(lines) + "\n"


def _wrapped(text: str, *, first: str = "", rest: str = "") -> list[str]:
    """Return the lines of a text, as wide as the terminal, and no wider than is read with ease."""
    columns = min(shutil.get_terminal_size().columns, _MOST_COLUMNS)
    return textwrap.wrap(text, columns, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False) or [first]
