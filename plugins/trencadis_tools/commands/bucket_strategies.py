"""Bucketing strategies for ``trencadis buckets``, built by name as the engine would, with the command's flags as options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from trencadis.api import Config, RegisteredComponent, Registry, reason, value_error
from trencadis.clock import SystemClock
from trencadis.errors import ConfigValueError, UnknownKeyError
from trencadis.interfaces import BucketingStrategy, ComponentContext
from trencadis.records import BucketLimits
from trencadis_gallery.bucketing.workloads import DeviceCost

__all__ = ["build_strategies", "device_cost", "max_draft_tokens"]

_OFFERED = frozenset({"trace"})
"""Flags that the command itself also uses, so that a strategy need not have them."""


def build_strategies(
    names: Mapping[str, str], flags: Mapping[str, Any], limits: BucketLimits, config: Config, registry: Registry
) -> dict[str, BucketingStrategy]:
    """Return strategies by name.

    Args:
        names: Names or import paths, each mapped to the flag that gave it, for messages.
        flags: Values of command flags that are options of a strategy, by key, such as ``generation``. A strategy gets the keys that
            its config class has; None: the flag was not given.
        limits: Limits that the strategies are built for.
        config: Configuration with all other options.
        registry: The plugins.

    Raises:
        UnknownComponentError: A name that no plugin offers.
        UnknownKeyError: A flag that none of the strategies knows.
        ConfigValueError: A flag's value that a strategy refuses, or an option it lacks.
        PluginError: A strategy cannot be built.
    """
    given = {key: value for key, value in flags.items() if value is not None}
    context = ComponentContext(clock=SystemClock(), seed=config.engine.seed, limits=limits)
    found = {name: registry.select("bucketing", name, source=source, may_import=True) for name, source in names.items()}
    options = {name: _options(item, config) for name, item in found.items()}
    for key in given.keys() - _OFFERED:
        if not any(_knows(item, key) for item in options.values()):
            raise UnknownKeyError(
                f"flag --{key.replace('_', '-')}: {', '.join(names)} has no option {key}.",
                hint="Leave the flag out, or choose a strategy that has it.",
            )
    strategies = {}
    for name, item in found.items():
        known = {key: value for key, value in given.items() if _knows(options[name], key)}
        strategies[name] = registry.build(item, _evolved(name, options[name], known), context)
    return strategies


def device_cost(config: Config) -> DeviceCost:
    """Return the constants of the estimates from the configured bucketing component, else the defaults. Pure."""
    costs = (getattr(options, "cost", None) for options in config.bucketing.components.values())
    return next((cost for cost in costs if isinstance(cost, DeviceCost)), DeviceCost())


def max_draft_tokens(config: Config) -> int:
    """Return the longest draft of the configured speculator; 0 without one, or if its table has no such option. Pure."""
    options = config.speculation.components.get(config.speculation.name)
    return int(getattr(options, "max_draft_tokens", 0))


def _options(item: RegisteredComponent, config: Config) -> Any:
    objects = config.bucketing.components
    if item.name in objects:
        return objects[item.name]
    try:
        return item.component.config()
    except TypeError as error:
        needed = [field.name for field in attrs.fields(item.component.config) if field.default is attrs.NOTHING]
        flags = ", ".join(f"--bucketing.{item.name}.{key.replace('_', '-')}" for key in needed)
        raise ConfigValueError(
            f"[bucketing.{item.name}] {', '.join(needed)}: not set, and {item} needs it.",
            hint=f"Set it in that table, or with {flags}.",
        ) from error


def _knows(options: Any, key: str) -> bool:
    return attrs.has(type(options)) and any(field.name == key for field in attrs.fields(type(options)))


def _evolved(name: str, options: Any, values: Mapping[str, Any]) -> Any:
    """Set one flag after the other, so that an error names its flag."""
    for key, value in values.items():
        try:
            options = attrs.evolve(options, **{key: value})
        except (TypeError, ValueError) as error:
            field = getattr(attrs.fields(type(options)), key)
            source = f"flag --{key.replace('_', '-')}"
            raise value_error(
                f"bucketing.{name}.{key}", value, source, reason(field.validator, value, error)
            ) from error
    return options
