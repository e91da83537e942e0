"""What a configuration names, before it can be understood: whether a plugin that is there on demand may have anything to do.

A name counts wherever it stands in flags, variables, the file or Python, as a key, a value or part of either. To find it too often costs an
import; what is found too rarely shows as an unknown key or component, and then everything is loaded and looked at again.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trencadis.config import Config, ConfigFile, read_config_file
from trencadis.config.dump import dump_config
from trencadis.config.settings import ENVIRONMENT_PREFIX

__all__ = ["mentions_in"]


def mentions_in(
    file: ConfigFile | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    flags: Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
) -> Callable[[str], bool]:
    """Return a function that says whether a name stands anywhere in these sources, or a variable begins with it if it ends in ``_``. Pure.

    Args:
        file: The content of the configuration file; None: of the one that a variable names.
        environ: The environment; None: this process's own.
        flags: The command line.
        overrides: From Python; tables with nothing but default values do not count.
    """
    environment = os.environ if environ is None else environ
    content = read_config_file(environ=environment) if file is None else file
    if content.error is not None:  # which is said once the configuration is loaded
        return lambda _: True
    variables = [f"{name} {value}" for name, value in environment.items() if name.startswith(ENVIRONMENT_PREFIX)]
    tables = [content.tree, _not_default(overrides or {})]
    written = [*flags, *variables, *(json.dumps(table, default=str, ensure_ascii=False) for table in tables)]
    text = _spelt("\n".join(written))

    def mentions(name: str) -> bool:
        if name.endswith("_"):
            return any(variable.startswith(name) for variable in environment)
        return _spelt(name) in text

    return mentions


def _spelt(text: str) -> str:
    return text.lower().replace("-", "_")


def _not_default(overrides: Mapping[str, Any]) -> list[Any]:
    """Return what the tables set, and the tables within them; the name of a table with nothing but defaults does not count."""
    found: list[Any] = []
    for name, value in overrides.items():
        if name not in _defaults() or not isinstance(value, Mapping):
            found.append({name: value})
            continue
        default = _defaults()[name]
        inner = {key: one for key, one in value.items() if isinstance(one, Mapping)}
        own = {
            key: one for key, one in value.items() if key not in inner and (key not in default or default[key] != one)
        }
        found += [inner, {name: own}] if own else [inner]
    return found


@functools.cache
def _defaults() -> Mapping[str, Any]:
    return dump_config(Config())
