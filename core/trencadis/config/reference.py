"""Reference of all settings in Markdown, and the list of flags, made from the catalogue of settings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Container
from typing import Any

import attrs

from trencadis.config.aliases import alias_rows
from trencadis.config.attribution import demand
from trencadis.config.convert import describe_type
from trencadis.config.messages import show
from trencadis.config.settings import Setting, Settings

__all__ = ["SPELLINGS", "alias_table", "describe", "flag_names", "reference_page", "tables_reference"]

SPELLINGS = """The last of these that sets a value wins: the default, the config file (`--config FILE` or `TRENCADIS_CONFIG`;
TOML, or YAML where PyYAML is installed), the environment, a flag, an argument from Python.
`trencadis config --explain` shows every value and its source.

One key has three spellings:

| where | spelling |
|---|---|
| file | `[bucketing.exponential]` `limit = 12` |
| environment | `TRENCADIS_BUCKETING__EXPONENTIAL__LIMIT=12` |
| flag | `--bucketing.exponential.limit 12` |

In a flag, underscores of the key are dashes: `--engine.max-num-seqs`. The table may be left out where no other table has the key:
`--max-num-seqs`; keys of secrets are not given so. A flag that takes true or false may stand alone for
true; a list is written with commas. `TRENCADIS_BLOCKED_PLUGINS` adds to `[plugins] blocked`.

The table of a noun names a component; the component's own keys are in a table below it. A component may also be given by
import path, `name = "my_package.module:Policy"`; `[scheduling.options]` is then passed to it as keyword arguments. A
parameter called `context` receives the `ComponentContext`.
"""
"""How settings are written and which source wins, Markdown."""

_ALIASES = """These environment variables of other software are read with the meaning that they have there, so an existing deployment
runs unchanged. A `TRENCADIS_` variable takes precedence; the log names a variable that is overridden.
"""


def describe(setting: Setting) -> str:
    """Return what a setting takes: ``a whole number >= 1`` or ``one of: auto, float32``. Pure."""
    wanted = demand(setting.attribute.validator)
    return wanted if wanted.startswith("one of") else f"{describe_type(setting.type)} {wanted}".rstrip()


def flag_names(settings: Settings) -> list[str]:
    """Return every config flag, sorted. Pure."""
    return sorted(setting.flag for setting in settings)


def reference_page(settings: Settings) -> str:
    """Return the reference of all settings as one page of Markdown. Pure."""
    head = "# Configuration\n\n<!-- Made by trencadis config --reference. -->\n"
    aliases = f"## Names of other software\n\n{alias_table(settings)}"
    return "\n".join([head, SPELLINGS, tables_reference(settings), aliases])


def tables_reference(settings: Settings, *, nouns: Container[str] | None = None) -> str:
    """Return a section in Markdown for each table: its keys with type, default, unit and meaning. Pure.

    Args:
        settings: The catalogue.
        nouns: First part of the names of the tables to show; None: all.
    """
    parts = []
    for table, config_class in settings.tables().items():
        if nouns is not None and table.partition(".")[0] not in nouns:
            continue
        rows = [setting for setting in settings if setting.table == table]
        level = "##" if "." not in table else "###"
        parts.append(f"{level} `[{table}]`\n")
        if rows:
            if purpose := _purpose(config_class, table, settings):
                parts.append(f"{purpose}\n")
            lines = [
                "| key | type | default | unit | meaning |",
                "|---|---|---|---|---|",
                *(_row(item) for item in rows),
            ]
            parts.append("\n".join(lines) + "\n")
        else:
            parts.append("Nothing to set.\n")
    return "\n".join(parts)


def alias_table(settings: Settings) -> str:
    """Return the environment names of other software with the settings they set, Markdown. Pure."""
    rows = [f"| `{name}` | {paths} |" for name, paths in alias_rows(settings)]
    return "\n".join([_ALIASES, "| environment | setting |", "|---|---|", *rows]) + "\n"


def _row(setting: Setting) -> str:
    default = "required" if setting.attribute.default is attrs.NOTHING else f"`{_default(setting)}`"
    cells = (f"`{setting.key}`", describe(setting), default, setting.unit, setting.help)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(setting: Setting) -> str:
    return "derived" if setting.default is attrs.NOTHING else show(setting.default)


def _purpose(config_class: type[Any], table: str, settings: Settings) -> str:
    """Return the first paragraph of a class's docstring, without the table's name in front; may be empty."""
    if table in settings.nouns:
        return f"Which component of the noun `{table}`."
    text = (inspect.getdoc(config_class) or "").split("\n\n")[0].replace("\n", " ")
    own = re.match(r"Table ``[^`]+``(: |\.\s*)", text)
    text = (text[own.end() :] if own else text).replace("``", "`")
    return text[:1].upper() + text[1:]
