"""A new plugin package on disk, from the templates beside this module.

names + the noun's start ▶ one set of values ▶ every template ▶ files
"""

from __future__ import annotations

import importlib
import importlib.resources
import string
from collections.abc import Mapping
from pathlib import Path

import trencadis
from trencadis.errors import ConfigValueError
from trencadis.hookspecs import NOUNS
from trencadis_tools.new_plugin.names import PluginNames
from trencadis_tools.new_plugin.nouns import HOOKS, STAGE, STARTS

__all__ = ["files_of", "new_plugin"]


def new_plugin(names: PluginNames, directory: Path) -> tuple[Path, list[Path]]:
    """Write a package into a new folder; return the folder and its files.

    Args:
        names: Names of the plugin.
        directory: Existing directory in which the folder is made.

    Raises:
        ConfigValueError: The directory does not exist, cannot be written to, or already has an entry of that name.
    """
    if not directory.is_dir():
        raise ConfigValueError(
            f"new-plugin: {directory} is no directory.", hint="Give an existing one with --directory."
        )
    home = directory / names.project
    files = files_of(names)
    try:
        home.mkdir()
    except FileExistsError:
        raise ConfigValueError(
            f"new-plugin: {home} exists already; nothing was written.",
            hint="Choose another name or another --directory, or move it away.",
        ) from None
    except OSError as error:
        raise ConfigValueError(f"new-plugin: {home} cannot be made: {error}.") from error
    for path, text in files.items():
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text(text, encoding="utf-8")
    return home, [Path(path) for path in files]


def files_of(names: PluginNames) -> dict[str, str]:
    """Return the text of each file of a package by path. Pure; reads the templates.

    Args:
        names: Names of the plugin.
    """
    values = _values(names)
    source, noun = f"src/{names.package}", names.noun
    templates = {
        "pyproject.toml": "pyproject.toml",
        "README.md": "README.md",
        f"{source}/__init__.py": "init_stage.py" if noun == STAGE else "init.py",
        f"{source}/config.py": "config.py",
        f"{source}/{names.name}.py": f"{noun}.py",
        f"tests/test_{names.name}.py": f"test_{noun}.py",
        "tests/test_plugin.py": "test_plugin_stage.py" if noun == STAGE else "test_plugin.py",
    }
    files = {path: _in_order(_render(template, values), names) for path, template in templates.items()}
    return {**files, f"{source}/py.typed": "", ".gitignore": "__pycache__/\n*.egg-info/\ndist/\n.*_cache/\n"}


def _render(template: str, values: Mapping[str, str]) -> str:
    folder = importlib.resources.files("trencadis_tools.new_plugin") / "templates"
    text = (folder / f"{template}.tmpl").read_text(encoding="utf-8")
    return string.Template(text).substitute(values)


def _in_order(text: str, names: PluginNames) -> str:
    """Return the text with the package's own imports sorted, since their order depends on the name."""
    lines = text.split("\n")
    own = [i for i, line in enumerate(lines) if line.startswith(f"from {names.package}.")]
    for i, line in zip(own, sorted(lines[i] for i in own), strict=True):
        lines[i] = line
    return "\n".join(lines)


def _values(names: PluginNames) -> dict[str, str]:
    start, noun, name = STARTS[names.noun], names.noun, names.name
    option = start.option
    values = {
        "noun": noun,
        "name": name,
        "module": name,
        "project": names.project,
        "package": names.package,
        "entry_point": names.entry_point,
        "class_name": names.class_name,
        "summary": start.summary,
        "contract": start.contract,
        "maker": start.maker.replace("{class}", names.class_name),
        "call": start.call.replace("{class}", names.class_name),
        "option": option.name,
        "option_type": option.type,
        "option_default": option.default,
        "option_help": option.help,
        "option_unit": option.unit,
        "validator": option.validator,
        "validator_import": option.validator.partition("(")[0],
        "minimum": ".".join(trencadis.__version__.split(".")[:2]),
    }
    if noun == STAGE:
        return {
            **values,
            "table": name,
            "part": STAGE,
            "kind": "a stage",
            "suites": "stages",
            "config_example": f"[{name}]\n{option.name} = {start.example}",
        }
    interfaces = "trencadis.interfaces" if noun in NOUNS else "trencadis_kv.interfaces"
    choose = f'[observer]\nnames = ["log", "{name}"]' if noun == "observer" else f'[{noun}]\nname = "{name}"'
    return {
        **values,
        "table": f"{noun}.{name}",
        "part": f"{noun} component",
        "kind": f"one more component of the noun `{noun}`",
        "suites": "the noun",
        "hook": HOOKS[noun],
        "interfaces": interfaces,
        "import_noun": "" if noun in NOUNS else "import trencadis_kv\n",
        "register_noun": "" if noun in NOUNS else "    trencadis_registry.register(trencadis_kv)\n",
        "interface_file": f"{interfaces.replace('.', '/')}/{noun}.py",
        "interface_version": str(importlib.import_module(f"{interfaces}.{noun}").INTERFACE_VERSION),
        "config_example": f"{choose}\n[{noun}.{name}]\n{option.name} = {option.default}",
    }
