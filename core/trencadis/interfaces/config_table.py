"""A table of the configuration as a plugin offers it."""

from __future__ import annotations

from typing import Any

import attrs

__all__ = ["ConfigTable"]


def _check_name(_: object, __: attrs.Attribute[str], name: str) -> None:
    if not name.isidentifier() or name != name.lower():
        raise ValueError(f"table name {name!r} must be lower-case letters, digits and underscores")


@attrs.frozen(kw_only=True)
class ConfigTable:
    """A table ``[name]`` of an application's own; components have theirs, ``[noun.name]``, without it.

    Its keys come from the file, the environment, flags and Python as all others do, and are documented by ``trencadis config
    --explain``. Read it with ``config.table(name, config_class)``.

    Attributes:
        name: Lower-case, with underscores; no table of the core, and unique.
        config: An attrs class whose fields are declared with :func:`~trencadis.interfaces.setting`.
    """

    name: str = attrs.field(validator=_check_name)
    config: type[Any]
