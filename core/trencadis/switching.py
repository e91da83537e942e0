"""Another scheduling policy while the engine serves: what a change asks for, checked as the configuration is checked.

written config + present plan + SchedulingChange ▶ resolve_change ▶ SchedulingInForce
"""

from __future__ import annotations

from collections.abc import Mapping
from types import EllipsisType
from typing import Any

import attrs

from trencadis.config import Config
from trencadis.config.builder import ConfigBuilder
from trencadis.config.dump import dump_config, dump_options
from trencadis.config.import_paths import is_import_path, refuse_import_path
from trencadis.config.messages import origin, show
from trencadis.config.sources import from_tree
from trencadis.errors import ConfigValueError, UnknownKeyError, did_you_mean
from trencadis.registry.plan import NOTHING_CHOSEN, Choice, ResolvedPlan, resolve_plan
from trencadis.registry.registry import Registry

__all__ = ["SchedulingChange", "SchedulingInForce", "change_table", "resolve_change"]

_KEYS = ("name", "options", "shadow")


@attrs.frozen(kw_only=True)
class SchedulingChange:
    """What to change about scheduling.

    Attributes:
        name: The policy; None: the present one, as it is unless there are options.
        options: Keys of its table that differ from the written configuration; None: none do.
        shadow: The policy beside it, with the options of its own table; empty: none; None: the present one, as it is.
        source: Who asks, for messages.
        may_import: The operator's own code asks, so that import paths are followed; else only those that are in the configuration or in force.
    """

    name: str | None = None
    options: Mapping[str, Any] | None = None
    shadow: str | None = None
    source: str = "set_scheduling"
    may_import: bool = False

    @classmethod
    def of(cls, table: Mapping[str, Any], *, source: str, may_import: bool = False) -> SchedulingChange:
        """Return the change that a table such as ``{"name": "priority", "shadow": None}`` asks for. Pure.

        Args:
            table: ``name``, ``options`` and ``shadow``, each optional; a ``shadow`` of None ends it.
            source: Who asks.
            may_import: See :class:`SchedulingChange`.

        Raises:
            UnknownKeyError: Another key.
            ConfigValueError: A value of the wrong type, or nothing to change.
        """
        for key in table:
            if key not in _KEYS:
                known = ", ".join(_KEYS)
                raise UnknownKeyError(
                    f"{key}{origin(source)}: no such key.{did_you_mean(key, _KEYS)} There are: {known}."
                )
        if not table:
            raise ConfigValueError(f"there is nothing to change{origin(source)}.", hint="Give a name or a shadow.")
        _expect(table, "name", str, "text", source)
        _expect(table, "options", Mapping, "a table", source)
        _expect(table, "shadow", str | None, "text, or none", source)
        shadow = (table["shadow"] or "") if "shadow" in table else None
        return cls(
            name=table.get("name"), options=table.get("options"), shadow=shadow, source=source, may_import=may_import
        )

    @property
    def replaces_policy(self) -> bool:
        """Whether the policy that decides is built anew."""
        return self.name is not None or self.options is not None


def change_table(
    name: str | None, options: Mapping[str, Any] | None, shadow: str | EllipsisType | None
) -> dict[str, Any]:
    """Return the table of a change, as :meth:`SchedulingChange.of` takes it, from arguments in Python. Pure.

    Args:
        name: None: the present one.
        options: None: none are given.
        shadow: None: there shall be none; ``...``: the present one stays.
    """
    table: dict[str, Any] = {}
    if name is not None:
        table["name"] = name
    if options is not None:
        table["options"] = options
    if shadow is not ...:
        table["shadow"] = shadow
    return table


@attrs.frozen(kw_only=True)
class SchedulingInForce:
    """Which policies schedule now.

    Attributes:
        written: The configuration as the operator wrote it; what a change leaves out is as it says.
        name: The policy, as the configuration would name it.
        options: Options of its table that differ from the written ones.
        plan: Plan of all components; its hash tells it all.
        shadow_plan: The one by which the shadow is built: its options are those that were written.
    """

    written: Config
    name: str
    options: Mapping[str, Any] = attrs.field(factory=dict)
    plan: ResolvedPlan
    shadow_plan: ResolvedPlan

    @property
    def import_paths(self) -> frozenset[str]:
        """Import paths of policies in the configuration and in force, all by the operator. Pure."""
        written = self.written.scheduling
        shadow = "" if self.plan.shadow is None else self.plan.shadow.component.name
        named = (written.name, written.fallback, written.shadow, self.name, shadow)
        return frozenset(name for name in named if is_import_path(name))

    def as_change(self) -> dict[str, Any]:
        """Return the table of the change that puts this in force from the configuration: every option except secrets. Pure."""
        options = self.plan.choices["scheduling"].options
        secrets = set()
        if attrs.has(type(options)):
            secrets = {field.name for field in attrs.fields(type(options)) if field.metadata.get("secret")}
        plain = {key: value for key, value in dump_options(options).items() if key not in secrets}
        shadow = None if self.plan.shadow is None else self.plan.shadow.component.name
        return {"name": self.name, "options": plain, "shadow": shadow}

    @classmethod
    def at_start(cls, config: Config, plan: ResolvedPlan) -> SchedulingInForce:
        """Return what the configuration itself puts in force. Pure."""
        return cls(written=config, name=config.scheduling.name, plan=plan, shadow_plan=plan)


def resolve_change(present: SchedulingInForce, registry: Registry, change: SchedulingChange) -> SchedulingInForce:
    """Return what will be in force with a change. Builds nothing; imports only policies given by import path.

    Args:
        present: Scheduling in force.
        registry: The plugins.
        change: Change to make.

    Raises:
        ImportPathRefusedError: An import path that does not come from the operator.
        ConfigError: A name that no plugin offers, an option that its table does not have, or a value out of range; in the words that
            the same mistake in a config file gets.
        PluginError: An import path cannot be imported, or a component requires what no chosen one provides.
    """
    name = present.name if change.name is None else change.name
    options = (change.options or {}) if change.replaces_policy else present.options
    for key, asked in (("name", change.name), ("shadow", change.shadow)):
        if asked and is_import_path(asked) and not change.may_import and asked not in present.import_paths:
            raise refuse_import_path(f"scheduling.{key}", asked, change.source)
    source = {"scheduling.name": change.source}
    may_import = change.may_import or not change.replaces_policy  # what is in force was looked at before
    live = _live_config(present, registry, name, options, change.source, may_import=may_import)
    resolved = resolve_plan(live, registry, sources=source)
    shadow, shadow_plan, shadow_inner = present.plan.shadow, present.shadow_plan, present.plan.inner
    if change.shadow is not None:
        shadow, shadow_inner = None, {}
    if change.shadow:
        registry.select("scheduling", change.shadow, source=change.source, key="shadow", may_import=True)
        config = _shadow_config(present, registry, change.shadow, change.source)
        shadow_plan = resolve_plan(config, registry, sources={"scheduling.name": change.source})
        shadow, shadow_inner = shadow_plan.choices["scheduling"], shadow_plan.inner
    plan = attrs.evolve(
        present.plan,
        choices={**present.plan.choices, "scheduling": resolved.choices["scheduling"]},
        inner={**_named_by(shadow, shadow_inner), **resolved.inner},
        shadow=shadow,
        sources={**registry.sources, **source},
    )
    plan.check(registry)
    return attrs.evolve(present, name=name, options=options, plan=plan, shadow_plan=shadow_plan)


def _live_config(
    present: SchedulingInForce,
    registry: Registry,
    name: str,
    options: Mapping[str, Any],
    source: str,
    *,
    may_import: bool,
) -> Config:
    """Return the written configuration with another policy, whose name was looked at, and other options, as if they stood in a file."""
    if name in NOTHING_CHOSEN:
        registry.select("scheduling", name, source=source)  # raises: there is always a policy
    given = {"options" if is_import_path(name) else name: dict(options)} if options else {}
    return _loaded(present, registry, {"name": name, "shadow": ""}, source, given, may_import=may_import)


def _shadow_config(present: SchedulingInForce, registry: Registry, name: str, source: str) -> Config:
    """Return the written configuration as if the shadow were the policy."""
    return _loaded(present, registry, {"name": name, "shadow": "", "fallback": ""}, source)


def _loaded(
    present: SchedulingInForce,
    registry: Registry,
    table: Mapping[str, Any],
    source: str,
    options: Mapping[str, Any] | None = None,
    *,
    may_import: bool = False,
) -> Config:
    config, settings = present.written, registry.settings
    written = dump_config(config)["scheduling"]
    paths = [path for path in (written["name"], written["fallback"], written["shadow"]) if is_import_path(path)]
    if table["name"] not in paths and table.get("fallback", written["fallback"]) not in paths:
        written.pop("options", None)  # they are those of a policy that is named no more
    given = [
        *from_tree({"scheduling": written}, settings, "the configuration", may_import=True),
        *from_tree({"scheduling": table}, settings, source, may_import=True),
        *from_tree({"scheduling": options or {}}, settings, source, may_import=may_import),
    ]
    scheduling = ConfigBuilder(settings, {item.path: item for item in given}).config().scheduling
    # Which backend serves is settled: no plugin is asked again.
    backend = attrs.evolve(config.backend, name=present.plan.choices["backend"].component.name)
    return attrs.evolve(config, backend=backend, scheduling=scheduling)


def _named_by(outer: Choice | None, inner: Mapping[str, Choice]) -> dict[str, Choice]:
    """Return what a policy names, and what these name. Pure."""
    if outer is None:
        return {}
    component = outer.component
    own = {path: choice for path, choice in inner.items() if path.startswith(f"{component.noun}.{component.name}.")}
    for choice in list(own.values()):
        own |= _named_by(choice, inner)
    return own


def _expect(table: Mapping[str, Any], key: str, kind: Any, words: str, source: str) -> None:
    if key in table and not isinstance(table[key], kind):
        raise ConfigValueError(f"{key} = {show(table[key])}{origin(source)}: must be {words}.")
