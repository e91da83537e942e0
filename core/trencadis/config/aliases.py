"""Environment names of other software that mean one of our settings, so that an existing deployment moves over unchanged.

A config class, of a plugin too, declares them in a field's metadata: ``"aliases"`` is a name, several names, or a mapping
of names to functions that turn the text into a value. The schema's own are in a table here. The strongest name comes
first; a ``TRENCADIS_`` name is stronger than any alias, and a weaker name that says something else is reported.

    VLLM_SKIP_WARMUP=true ▶ Alias("VLLM_SKIP_WARMUP", "engine.warmup", inverted) ▶ RawValue("engine.warmup", False)
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
from trencadis.errors import did_you_mean, must_be_one_of

__all__ = ["Alias", "alias_rows", "aliases_of", "from_aliases", "truth", "warn_of_unused"]

_log = logging.getLogger(__name__)

Reader = Callable[[str], Any]
"""Text of a variable to the value of a setting; ``attrs.NOTHING`` if it says nothing about it. Raises ``ValueError``."""

_TRUE = frozenset({"true", "t", "1", "yes", "y", "on"})
_BUCKET_SIZE = re.compile(r"VLLM_(PROMPT|DECODE)_\w+_BUCKET_\w+")
_FALSE = frozenset({"false", "f", "0", "no", "n", "off"})


@attrs.frozen
class Alias:
    """An environment name of other software.

    Attributes:
        name: Such as ``VLLM_SKIP_WARMUP``.
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

    Source: vllm-gaudi, extension/environment.py, which takes all but the true words for false.
    """
    word = text.strip().lower()
    if word not in _TRUE | _FALSE:
        raise ValueError("must be true or false (also: yes, no, on, off, 1, 0).")
    return word in _TRUE


def _inverted(text: str) -> bool:
    return not truth(text)


def _strategy(text: str) -> str:
    names = {"exp": "exponential", "lin": "linear", "pad": "padding_aware"}
    if text not in names:
        raise ValueError(must_be_one_of(text, names))
    return names[text]


def _exponential_or_linear(text: str) -> str:
    return "exponential" if truth(text) else "linear"


def _exact_if_off(text: str) -> Any:
    return attrs.NOTHING if truth(text) else "exact"


def _on_or_off(text: str) -> str:
    return "on" if truth(text) else "off"


def _logs_moves(text: str) -> Any:
    return "defrag" in text.split(",") or attrs.NOTHING


def _level(text: str) -> str:
    return {"critical": "error", "warn": "warning"}.get(text.lower(), text.lower())


_SCHEMA: tuple[Alias, ...] = (
    Alias("VLLM_ENABLE_BUCKETING", "bucketing.name", _exact_if_off),
    Alias("VLLM_BUCKETING_FROM_FILE", "bucketing.name", lambda _: "from_file"),
    Alias("VLLM_EXPONENTIAL_BUCKETING", "bucketing.name", _exponential_or_linear),
    Alias("VLLM_BUCKETING_STRATEGY", "bucketing.name", _strategy),
    Alias("VLLM_SKIP_WARMUP", "engine.warmup", _inverted),
    Alias("VLLM_DEFRAG", "defragmenter.enabled", _on_or_off),
    Alias("VLLM_DEFRAG_THRESHOLD", "defragmenter.threshold"),
    Alias("VLLM_DEBUG", "defragmenter.log_moves", _logs_moves),
    Alias("VLLM_PREFIX_CACHING", "cache.prefix_caching", truth),
    Alias("VLLM_LOGGING_LEVEL", "log.level", _level),
)
"""Names for the schema's own settings. Source: vllm-gaudi, extension/config.py, features.py and runtime.py."""


def aliases_of(settings: Settings) -> list[Alias]:
    """Return every alias: the schema's, then those that config classes declare, the strongest of a setting first. Pure."""
    found = [alias for alias in _SCHEMA if settings.get(alias.path) is not None]
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
    """Log the names for bucket sizes that have no effect: of a strategy that is not chosen, or misspelt.

    Without that, a deployment that moves over with its sizes would be prepared for others, without any message.

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
    sizes = [variable for variable in known if _BUCKET_SIZE.fullmatch(variable)]
    for variable in environ if sizes else ():
        if _BUCKET_SIZE.fullmatch(variable) and variable not in known:
            close = did_you_mean(variable, sizes)
            _log.warning("%s=%s has no effect: there is no such bucket size.%s", variable, environ[variable], close)


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
