"""The reference page ``docs/configuration.md`` and the list of flags, made from the catalogue of settings."""

from __future__ import annotations

import inspect
import re
from typing import Any

import attrs

from trencadis.config.aliases import alias_rows
from trencadis.config.blame import demand
from trencadis.config.convert import describe_type
from trencadis.config.messages import show
from trencadis.config.settings import NOUN_TABLES, Setting, Settings

__all__ = ["describe", "flag_names", "reference_page"]

_HEAD = """# Configuration

<!-- Made by trencadis config --reference; change the config classes, not the page. -->

A value is taken from the last of these that gives one: its default, the config file (`--config FILE` or
`TRENCADIS_CONFIG`; TOML, or YAML where PyYAML is installed), the environment, a flag, an argument from Python.
`trencadis config --explain` shows every value and who set it.

One key has three spellings:

| where | spelling |
|---|---|
| file | `[bucketing.exponential]` `limit = 12` |
| environment | `TRENCADIS_BUCKETING__EXPONENTIAL__LIMIT=12` |
| flag | `--bucketing.exponential.limit 12` |

In a flag, underscores of the key are dashes: `--engine.max-num-seqs`. A flag that takes true or false may stand alone for
true; a list is written with commas. `TRENCADIS_BLOCKED_PLUGINS` adds to `[plugins] blocked`.

The table of a noun names a component; the component's own keys are in a table below it. A component may also be given by
import path, `name = "my_package.module:Policy"`; what `[scheduling.options]` holds is then passed to it as keyword
arguments. A parameter called `context` receives the `ComponentContext`.
"""

_ALIASES = """## Names of other software

An existing deployment moves over unchanged: these environment variables of the vLLM plugin for Gaudi are read with their
meaning there. A `TRENCADIS_` variable is stronger, and says so in the log.
"""


def describe(setting: Setting) -> str:
    """Return what a setting takes: ``a whole number >= 1`` or ``one of: auto, float32``. Pure."""
    wanted = demand(setting.attribute.validator)
    return wanted if wanted.startswith("one of") else f"{describe_type(setting.type)} {wanted}".rstrip()


def flag_names(settings: Settings) -> list[str]:
    """Return every config flag, sorted. Pure."""
    return sorted(setting.flag for setting in settings)


def reference_page(settings: Settings) -> str:
    """Return the reference page in Markdown. Pure."""
    parts = [_HEAD]
    for table, config_class in settings.tables().items():
        rows = [setting for setting in settings if setting.table == table]
        level = "##" if "." not in table else "###"
        parts.append(f"{level} `[{table}]`\n")
        if rows:
            if purpose := _purpose(config_class, table):
                parts.append(f"{purpose}\n")
            lines = [
                "| key | type | default | unit | meaning |",
                "|---|---|---|---|---|",
                *(_row(item) for item in rows),
            ]
            parts.append("\n".join(lines) + "\n")
        else:
            parts.append("Nothing to set.\n")
    return "\n".join([*parts, _aliases(settings)])


def _aliases(settings: Settings) -> str:
    rows = [f"| `{name}` | {paths} |" for name, paths in alias_rows(settings)]
    return "\n".join([_ALIASES, "| environment | setting |", "|---|---|", *rows]) + "\n"


def _row(setting: Setting) -> str:
    default = "required" if setting.attribute.default is attrs.NOTHING else f"`{_default(setting)}`"
    cells = (f"`{setting.key}`", describe(setting), default, setting.unit, setting.help)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(setting: Setting) -> str:
    return "derived" if setting.default is attrs.NOTHING else show(setting.default)


def _purpose(config_class: type[Any], table: str) -> str:
    """Return the first paragraph of a class's docstring, without the table's name in front; may be empty."""
    if table in NOUN_TABLES:
        return f"Which component of the noun `{table}`."
    text = (inspect.getdoc(config_class) or "").split("\n\n")[0].replace("\n", " ")
    own = re.match(r"Table ``[^`]+``(: |\.\s*)", text)
    text = (text[own.end() :] if own else text).replace("``", "`")
    return text[:1].upper() + text[1:]
