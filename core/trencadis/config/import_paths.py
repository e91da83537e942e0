"""Import paths, ``package.module:Attribute``, in values of the configuration, and who may give them.

To follow one is to run code. The operator may: in a file, the environment, a flag, or in Python. A client, a received file and
another process may not: from them a component is named as it is registered.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from trencadis.config.messages import spot
from trencadis.errors import ImportPathRefusedError

__all__ = ["import_paths_in", "is_import_path", "refuse_import_path"]

_IN_AN_OPTION = re.compile(r"\s*[^\W\d][\w.]*\s*:\s*[^\W\d][\w.]*\s*")
"""An option may hold a colon that is none, such as an address."""


def is_import_path(name: str) -> bool:
    """True for ``package.module:Attribute``, which names a component without a plugin. Pure."""
    return ":" in name


def import_paths_in(value: Any) -> Iterator[str]:
    """Yield the texts within the value of an option that could be followed as import paths. Pure."""
    if isinstance(value, str):
        if _IN_AN_OPTION.fullmatch(value):
            yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from import_paths_in(key)
            yield from import_paths_in(item)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from import_paths_in(item)


def refuse_import_path(path: str, name: str, source: str) -> ImportPathRefusedError:
    """Return the error for an import path that comes from elsewhere than the operator. Pure.

    Args:
        path: Dotted path of the setting.
        name: The import path.
        source: Who gave it.
    """
    module, _, attribute = name.partition(":")
    return ImportPathRefusedError(
        f"{spot(path, name, source)}: it would import {module.strip()} and call {attribute.strip() or 'what is in it'}. Import paths are "
        "followed in the operator's own configuration only: its file, environment, flags and Python code.",
        hint="Name a component that trencadis plugins lists.",
    )
