"""Environment variables with our prefix that belong to no setting: each was meant for one.

They are no errors: an orchestrator names variables after a service, such as ``TRENCADIS_PORT=tcp://10.0.0.7:8000``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from trencadis.config.aliases import aliases_of
from trencadis.config.settings import ENVIRONMENT_PREFIX, Settings
from trencadis.config.sources import BLOCKED_VARIABLE, FILE_VARIABLE, flat_names
from trencadis.errors import closest

__all__ = ["unknown_variables", "warn_of_unknown"]

_log = logging.getLogger(__name__)

_OWN = frozenset({FILE_VARIABLE, BLOCKED_VARIABLE})


def unknown_variables(environ: Mapping[str, str], settings: Settings) -> dict[str, str]:
    """Return by name what to do about each variable that has no effect and is no error either. Pure.

    Args:
        environ: The environment.
        settings: The catalogue.
    """
    known = _OWN | flat_names(settings).keys() | {alias.name for alias in aliases_of(settings)}
    return {
        name: _advice(name, settings)
        for name in sorted(environ)
        if name.startswith(ENVIRONMENT_PREFIX) and "__" not in name and name not in known
    }


def warn_of_unknown(unknown: Mapping[str, str]) -> None:
    """Log each variable of :func:`unknown_variables`. Its value stays untold: it may be a key."""
    for name, advice in unknown.items():
        _log.warning("environment %s has no effect. %s", name, advice)


def _advice(name: str, settings: Settings) -> str:
    word = name.removeprefix(ENVIRONMENT_PREFIX)
    meant = _by_key(word.lower(), settings) or _by_spelling(word, settings)
    if meant:
        return f'Did you mean "{meant}"?'
    return "Settings are named TRENCADIS_TABLE__KEY, with two underscores between table and key."


def _by_key(key: str, settings: Settings) -> str:
    """Return the variable of the setting whose key this is; of several, the one in the outermost table, if it is one."""
    found = sorted((setting for setting in settings if setting.key == key), key=lambda setting: _depth(setting.path))
    if not found or (len(found) > 1 and _depth(found[0].path) == _depth(found[1].path)):
        return ""
    return found[0].environment


def _depth(path: str) -> int:
    return path.count(".")


def _by_spelling(word: str, settings: Settings) -> str:
    names = (*_OWN, *(setting.environment for setting in settings))
    # Without the prefix, which all have: it would make every name alike.
    words = [name.removeprefix(ENVIRONMENT_PREFIX) for name in names]
    meant = closest(word, words)
    return f"{ENVIRONMENT_PREFIX}{meant}" if meant else ""
