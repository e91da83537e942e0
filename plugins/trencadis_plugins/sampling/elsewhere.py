"""Logits processors from other packages, by import path or by the name of an entry point."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from trencadis.errors import ConfigValueError, ContractError, PluginLoadError
from trencadis.interfaces import LogitsProcessor

__all__ = ["GROUP", "processor_from"]

GROUP = "trencadis.logits_processors"
"""Entry points of this group name classes of logits processors, or functions that return one."""


def processor_from(name: str) -> LogitsProcessor | None:
    """Return a fresh processor; None if nothing installed has the name.

    Args:
        name: An import path, ``package.module:Class``, or the name of an entry point.

    Raises:
        ConfigValueError: Two packages have an entry point of this name.
        PluginLoadError: It cannot be imported or made.
        ContractError: It is no logits processor.
    """
    point = EntryPoint(name=name, value=name, group=GROUP) if ":" in name else _entry_point(name)
    if point is None:
        return None
    where = f"[sampling.standard] processor {name!r}"
    try:
        made: Any = point.load()
        processor = made()
    except Exception as error:
        raise PluginLoadError(
            f"{where} cannot be made: {type(error).__name__}: {error}.",
            hint="Name a class that takes no arguments, importable where trencadis runs, or take the name out of the config.",
        ) from error
    if not isinstance(processor, LogitsProcessor):
        raise ContractError(
            f"{where} is {processor!r}, no LogitsProcessor.",
            hint="Derive it from trencadis.interfaces.LogitsProcessor.",
        )
    return processor


def _entry_point(name: str) -> EntryPoint | None:
    found = tuple(entry_points(group=GROUP, name=name))
    if len(found) > 1:
        owners = " and ".join(sorted(point.dist.name if point.dist else "?" for point in found))
        raise ConfigValueError(
            f"[sampling.standard] processor {name!r} is a name in {owners}.",
            hint="Give the import path, package.module:Class, of the one you mean.",
        )
    return found[0] if found else None
