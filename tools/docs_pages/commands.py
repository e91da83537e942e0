"""``docs/commands.md``: every command with its own arguments, from their parsers."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from typing import Any

from docs_pages.markdown import heading_note, table
from trencadis.cli.main import INTERRUPTED, add_arguments_of, all_commands
from trencadis.errors import ConfigError, InternalError
from trencadis.interfaces import Command
from trencadis.registry.manager import PluginLoader

__all__ = ["commands_page"]

_HEAD = f"""# Command line

{heading_note("the parsers of trencadis.cli")}

`trencadis COMMAND [flags]`; `trencadis --version` prints the version.

Unless it says otherwise, a command takes the config flags `--table.key VALUE` of [the configuration](configuration.md), which have a dot in their name. One whose key is in one table only may be written without the table, as `--max-num-seqs 64`. Beside these it takes:

| argument | meaning |
|---|---|
| `--config FILE` | config file, TOML; else `TRENCADIS_CONFIG` |
| `--model MODEL`, `-m MODEL` | short for `--model.path` |
| `--traceback` | show where an error was raised |

Exit codes: 0 if all went well, {ConfigError.exit_code} for an error of the user's, {InternalError.exit_code} for a bug in Trencadís, {INTERRUPTED} after Ctrl-C.
"""


def commands_page() -> str:
    """Return the page."""
    return "\n".join([_HEAD, *map(_section, all_commands(PluginLoader.of_installed()).commands.values())])


def _section(command: Command) -> str:
    module: Any = command.load()
    parser = argparse.ArgumentParser(prog=f"trencadis {command.name}", add_help=False)
    add_arguments_of(module, parser)
    rows = list(_rows(parser))
    rows += [
        (f"`{flag} VALUE`", "", f"short for `{long}`") for flag, long in getattr(module, "SHORT_FLAGS", {}).items()
    ]
    parts = [f"## `trencadis {command.name}`", command.summary]
    if not getattr(module, "TAKES_CONFIG", True):
        parts.append("It takes no config flags, and no file.")
    if rows:
        parts.append(table(("argument", "default", "meaning"), rows).rstrip("\n"))
    if parser.epilog:
        parts.append(parser.epilog)
    return "\n\n".join(parts) + "\n"


def _rows(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str, str]]:
    for action in parser._actions:  # noqa: SLF001 - argparse has no other list of its arguments
        if action.help is argparse.SUPPRESS:
            continue
        meaning = re.sub(r"\s*\(default: [^()]*\)$", "", (action.help or "") % vars(action) if action.help else "")
        yield _spelling(action), _default(action), meaning


def _spelling(action: argparse.Action) -> str:
    value = _value(action)
    if not action.option_strings:
        return f"`{value} ...`" if action.nargs in {"*", "+"} else f"`{value}`"
    return ", ".join(f"`{name}`" if action.nargs == 0 else f"`{name} {value}`" for name in action.option_strings)


def _value(action: argparse.Action) -> str:
    if action.choices:
        return "{" + ",".join(map(str, action.choices)) + "}"
    metavar = action.metavar if isinstance(action.metavar, str) else None
    return metavar or action.dest.upper()


def _default(action: argparse.Action) -> str:
    stated = re.search(r"\(default: ([^()]*)\)$", action.help or "")
    if stated:
        return stated.group(1)
    plain = action.default in (None, False, argparse.SUPPRESS) or not action.option_strings
    return "" if plain else f"`{action.default}`"
