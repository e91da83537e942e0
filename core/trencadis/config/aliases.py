"""Environment names of other software that mean one of our settings, so that an existing deployment moves over unchanged.

A config class declares them in a field's metadata: ``"aliases"`` is a name, several names, or a mapping of names to functions
that turn the text into a value. For settings of other tables a component's config class has two class attributes:
``other_aliases``, such mappings by the path of the setting, and ``alias_families``, what variables that match a pattern stand
for, so that a misspelt one is reported. The strongest name comes first; a ``TRENCADIS_`` name is stronger than any alias, and
a weaker name that says something else is reported.

    OTHER_NO_WARMUP=true ▶ Alias("OTHER_NO_WARMUP", "engine.warmup", inverted) ▶ RawValue("engine.warmup", False)
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import attrs

from trencadis.config.messages import value_error
from trencadis.config.settings import Setting, Settings
from trencadis.config.sources import RawValue
from trencadis.errors import did_you_mean

__all__ = ["Alias", "alias_rows", "aliases_of", "from_aliases", "truth", "warn_of_unused"]

_log = logging.getLogger(__name__)

Reader = Callable[[str], Any]
"""Text of a variable to the value of a setting; ``attrs.NOTHING`` if it says nothing about it. Raises ``ValueError``."""

_TRUE = frozenset({"true", "t", "1", "yes", "y", "on"})
_FALSE = frozenset({"false", "f", "0", "no", "n", "off"})


@attrs.frozen
class Alias:
    """An environment name of other software.

    Attributes:
        name: Such as ``OTHER_NO_WARMUP``.
        path: Dotted path of the setting it sets. One name may set several settings.
        read: Turns its text into the setting's value; None: as the setting's type says.
    """

    name: str
    path: str
    read: Reader | None = None


def truth(text: str) -> bool:
    """Return what a boolean variable says. Pure.

    Raises:
        ValueError: Neither yes nor no.
    """
    word = text.strip().lower()
    if word not in _TRUE | _FALSE:
        raise ValueError("must be true or false (also: yes, no, on, off, 1, 0).")
    return word in _TRUE


def aliases_of(settings: Settings) -> list[Alias]:
    """Return every alias: those for settings of other tables, then those of own fields, the strongest of a setting first. Pure."""
    found = [
        Alias(name, path, read)
        for config_class in settings.tables().values()
        for path, names in getattr(config_class, "other_aliases", {}).items()
        for name, read in names.items()
        if settings.get(path) is not None
    ]
    for setting in settings:
        found += _declared(setting)
    return found


def _declared(setting: Setting) -> Iterator[Alias]:
    declared = setting.attribute.metadata.get("aliases", ())
    if isinstance(declared, str):
        declared = (declared,)
    for name in declared:
        yield Alias(name, setting.path, declared[name] if isinstance(declared, Mapping) else None)


def from_aliases(environ: Mapping[str, str], settings: Settings) -> list[RawValue]:
    """Return the values of aliases that are set and not empty, at most one for each setting. Pure but for warnings.

    Raises:
        ConfigValueError: A text that the alias has no meaning for.
    """
    given: dict[str, RawValue] = {}
    for alias in aliases_of(settings):
        text = environ.get(alias.name, "")
        setting = settings.get(alias.path)
        item = _given(alias, setting, text) if text and setting is not None else None
        if item is None or setting is None:
            continue
        stronger = given.setdefault(alias.path, item)
        if stronger is not item and stronger.raw != item.raw:
            _log.warning("%s=%s is ignored for %s: %s says otherwise.", alias.name, text, alias.path, stronger.source)
        elif stronger is item and setting.environment in environ:
            own = setting.environment
            _log.warning("%s=%s is ignored for %s: environment %s is set too.", alias.name, text, alias.path, own)
    return list(given.values())


def _given(alias: Alias, setting: Setting, text: str) -> RawValue | None:
    """Return what an alias says about a setting; None if nothing."""
    source = f"environment {alias.name}"
    read = truth if alias.read is None and setting.type is bool else alias.read
    if read is None:
        return RawValue(path=alias.path, raw=text, source=source, is_text=True, may_import=True)
    try:
        value = read(text)
    except ValueError as error:
        raise value_error(alias.path, text, source, str(error), secret=setting.secret) from error
    return None if value is attrs.NOTHING else RawValue(path=alias.path, raw=value, source=source, may_import=True)


def warn_of_unused(
    given: Iterable[RawValue], environ: Mapping[str, str], settings: Settings, *, name: str, may_be: Collection[str]
) -> None:
    """Log the names that have no effect: of a bucketing strategy that is not chosen, or misspelt.

    Without that, a deployment that moves over with its bucket sizes would be prepared for others, without any message.

    Args:
        given: The values that count.
        environ: The environment.
        settings: The catalogue.
        name: ``[bucketing] name``.
        may_be: The strategies that it may stand for.
    """
    paths: dict[str, list[str]] = {}
    for item in given:
        paths.setdefault(item.source.removeprefix("environment "), []).append(item.path)
    known = {alias.name for alias in aliases_of(settings)}
    for variable in sorted(known & environ.keys() & paths.keys()):
        readers = _strategies(paths[variable])
        if readers and not set(readers) & set(may_be):
            listed = " or ".join(readers)
            text = environ[variable]
            _log.warning("%s=%s is for the bucketing %s only; [bucketing] name is %s.", variable, text, listed, name)
    for config_class in settings.tables().values():
        for pattern, what in getattr(config_class, "alias_families", {}).items():
            family = [one for one in known if re.fullmatch(pattern, one)]
            for variable in environ.keys() - known:
                if re.fullmatch(pattern, variable):
                    close = did_you_mean(variable, family)
                    _log.warning(
                        "%s=%s has no effect: there is no such %s.%s", variable, environ[variable], what, close
                    )


def _strategies(paths: Iterable[str]) -> list[str]:
    """Return the bucketing strategies whose tables hold all of these paths; none if some path lies elsewhere."""
    parts = [path.split(".") for path in paths]
    if not all(len(names) > 2 and names[0] == "bucketing" for names in parts):
        return []
    return sorted({names[1] for names in parts})


def alias_rows(settings: Settings) -> list[tuple[str, str]]:
    """Return each alias name with the settings it sets, for the reference page. Pure."""
    rows: dict[str, list[str]] = {}
    for alias in aliases_of(settings):
        rows.setdefault(alias.name, []).append(alias.path)
    return [(name, ", ".join(f"`{path}`" for path in paths)) for name, paths in rows.items()]
