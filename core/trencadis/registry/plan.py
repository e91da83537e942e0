"""The resolved plan: which component serves each noun, with which options, and the hash of it all.

config + registry ▶ resolve_plan ▶ ResolvedPlan ─ (the backend's layout is known) ▶ resolve_bucketing ▶ ResolvedPlan
"""

from __future__ import annotations

import enum
import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs

from trencadis.config import Config
from trencadis.config.messages import DEFAULT, spot
from trencadis.config.schema import (
    BUCKETING_BY_LAYOUT,
    DEFAULT_BACKEND,
    DEFAULT_EXECUTOR,
    EXECUTOR_OF_RANKS,
    NounConfig,
)
from trencadis.errors import CapabilityError, ConfigValueError, ContractError, UnknownComponentError
from trencadis.faults import shown
from trencadis.records import LayoutFeature
from trencadis.registry.capabilities import negotiate
from trencadis.registry.collect import RegisteredComponent
from trencadis.registry.registry import Registry

__all__ = ["AUTO", "NOTHING_CHOSEN", "UNIFIED_SHAPES", "Choice", "ResolvedPlan", "resolve_plan"]

AUTO = "auto"
"""Name in ``[backend]``, ``[bucketing]`` and ``[executor]`` that leaves the choice to plugins, the backend's layout and the number of ranks."""

UNIFIED_SHAPES = "bucketing.unified"
"""Capability of a bucketing that knows the shapes of a backend with the layout ``unified``."""

NOTHING_CHOSEN = frozenset({"", "none"})
"""Names that stand for no component, unless one of the noun is called so."""


@attrs.frozen(kw_only=True)
class Choice:
    """A chosen component and its options.

    Attributes:
        component: Which.
        options: Instance of its config class; a mapping for one given by import path.
    """

    component: RegisteredComponent
    options: Any


@attrs.frozen(kw_only=True)
class ResolvedPlan:
    """Which component serves each noun.

    Attributes:
        choices: By noun; a noun without a component, such as ``speculation`` with the name ``none``, is absent. ``bucketing``
            is absent while it waits for the backend's layout.
        fallbacks: Replacements of chosen components that raise in a step, by noun; absent: the step fails.
        observers: Active observers, in the order of the config.
        shadow: Scheduling policy that is asked beside the chosen one and decides nothing, or None.
        by_layout: Candidates for a bucketing left to ``auto``, by batch layout, as far as plugins offer them; empty if the config named one.
        inner: Components that others name in their config, in a field with the metadata ``component``, one or several; by dotted path.
        sources: Who named each component, by dotted path; for messages.
        stage_features: The layouts under which settings of stages are refused.
    """

    choices: Mapping[str, Choice]
    fallbacks: Mapping[str, Choice]
    observers: tuple[Choice, ...]
    shadow: Choice | None = None
    by_layout: Mapping[str, Choice] = attrs.field(factory=dict)
    inner: Mapping[str, Choice] = attrs.field(factory=dict)
    sources: Mapping[str, str] = attrs.field(factory=dict, eq=False, repr=False)
    stage_features: tuple[LayoutFeature, ...] = attrs.field(default=(), eq=False, repr=False)

    def resolve_bucketing(self, layout: str) -> ResolvedPlan:
        """Return the plan with its bucketing chosen; itself if the config named one. Pure.

        Args:
            layout: Layout of the backend's capabilities: ``ragged``, ``padded`` or ``unified``.

        Raises:
            ContractError: The backend states another layout.
            UnknownComponentError: No plugin offers the bucketing of that layout.
            CapabilityError: The bucketing requires what no chosen component provides, or does not know unified shapes.
        """
        if "bucketing" in self.choices:
            _check_shapes(self, layout)
            return self
        name = BUCKETING_BY_LAYOUT.get(layout)
        if name is None:
            backend = self.choices["backend"].component
            raise ContractError(
                f"{backend} states layout = {shown(layout)}; there are: {', '.join(BUCKETING_BY_LAYOUT)}."
            )
        if layout not in self.by_layout:
            where = spot("bucketing.name", AUTO, self.sources.get("bucketing.name", ""))
            raise UnknownComponentError(
                f'{where}: a {layout} backend takes "{name}", which no plugin offers.',
                hint="Name a bucketing, or install or unblock the package that offers it.",
            )
        resolved = attrs.evolve(self, choices={**self.choices, "bucketing": self.by_layout[layout]})
        resolved.check()
        _check_shapes(resolved, layout)
        return resolved

    def inner_choice(self, noun: str, name: str) -> Choice:
        """Return a component that another one names in its config. Pure.

        Raises:
            ContractError: None names it in a field with the metadata ``component``.
        """
        for choice in self.inner.values():
            if (choice.component.noun, choice.component.name) == (noun, name):
                return choice
        raise ContractError(
            f"A component asks for the {noun} component {name!r}, which no field of a config names.",
            hint=f'Give the field that holds the name the metadata "component": "{noun}".',
        )

    def named_choices(self) -> Iterator[tuple[str, Choice]]:
        """Yield every chosen component with the path of the setting that names it, such as ``observer.names[0]``. Pure."""
        for noun, choice in self.choices.items():
            yield f"{noun}.name", choice
        for i, choice in enumerate(self.observers):
            yield f"observer.names[{i}]", choice
        if self.shadow is not None:
            yield "scheduling.shadow", self.shadow
        yield from self.inner.items()
        for noun, choice in self.fallbacks.items():
            yield f"{noun}.fallback", choice

    def code_of(self, *nouns: str) -> dict[str, tuple[str, str, str, str]]:
        """Return name, distribution, version and digest of the code of chosen components, by path of the setting that names each. Pure.

        Args:
            nouns: First parts of the paths to return; none: all paths.
        """
        return {
            path: (one.name, one.provenance.distribution, one.provenance.version, one.provenance.code_digest)
            for path, choice in self.named_choices()
            for one in [choice.component]
            if not nouns or path.partition(".")[0] in nouns
        }

    def check(self, registry: Registry | None = None) -> None:
        """Negotiate capabilities. Pure.

        Args:
            registry: To say which installed component would provide what is missing.

        Raises:
            CapabilityError: A component requires what no chosen one provides.
        """
        # Read only where something is missing.
        offers = (
            () if registry is None else (item for noun in registry.nouns for item in registry.components(noun).values())
        )
        named = [(path.partition("[")[0], choice.component) for path, choice in self.named_choices()]
        negotiate(named, offers=offers, sources=self.sources)

    @functools.cached_property
    def plan_hash(self) -> str:
        """BLAKE2b-128 of nouns, components, distributions, versions, code and options, 32 hexadecimal digits.

        A bucketing left to ``auto`` counts by its candidates, so that the hash is the same before a backend has said its layout and after.
        """
        facts = {
            "choices": {
                noun: _facts(choice)
                for noun, choice in self.choices.items()
                if not (noun == "bucketing" and self.by_layout)
            },
            "fallbacks": {noun: _facts(choice) for noun, choice in self.fallbacks.items()},
            "observers": [_facts(choice) for choice in self.observers],
            "by_layout": {layout: _facts(choice) for layout, choice in self.by_layout.items()},
        }
        if self.shadow is not None:
            facts["shadow"] = _facts(self.shadow)
        if self.inner:  # hashes of plans without any stay what they were
            facts["inner"] = {path: _facts(choice) for path, choice in self.inner.items()}
        return _digest(facts)

    def hash_of(self, noun: str) -> str:
        """Return BLAKE2b-128 of what serves one noun: the component and those that it names, versions and options. Pure."""
        inner = {path: _facts(choice) for path, choice in self.inner.items() if path.startswith(f"{noun}.")}
        return _digest({"choice": _facts(self.choices[noun]), "inner": inner})


def resolve_plan(config: Config, registry: Registry, *, sources: Mapping[str, str] | None = None) -> ResolvedPlan:
    """Return which component serves each noun. Builds nothing; imports only components given by import path.

    Args:
        config: The configuration, loaded with the registry's config classes.
        registry: The registry.
        sources: Sources of ``ResolvedConfig``, for messages; None: those the registry was told.

    Raises:
        UnknownComponentError: A name that no plugin offers.
        CapabilityError: A component requires what no chosen one provides.
        PluginLoadError: An import path cannot be imported.
        ContractError: An import path leads to something else than the noun's contract.
        ConfigValueError: A component is within itself or experimental, or a role where nothing hands KV over.
    """
    sources = registry.sources if sources is None else sources
    resolver = _Resolver(config, registry, sources)
    choices, fallbacks = resolver.choices(), resolver.fallbacks()
    observers = tuple(resolver.choice("observer", name, "names") for name in config.observer.names)
    shadow = resolver.shadow()
    shadows = () if shadow is None else (shadow,)
    plan = ResolvedPlan(
        choices=choices,
        fallbacks=fallbacks,
        observers=observers,
        shadow=shadow,
        by_layout=resolver.by_layout(),
        inner=resolver.inner([*choices.values(), *fallbacks.values(), *observers, *shadows]),
        sources=dict(sources),
        stage_features=tuple(feature for one in registry.stages for feature in one.definition.layouts),
    )
    plan.check(registry)
    _check_role(plan, config.engine.role)
    return plan


class _Resolver:
    """Looks names up, one noun after the other."""

    def __init__(self, config: Config, registry: Registry, sources: Mapping[str, str]) -> None:
        self._config = config
        self._registry = registry
        self._sources = sources
        idle = {"observer"}
        if config.parallel.data == 1:
            idle.add("router")  # there is nothing to choose among
        self._nouns = [
            name
            for name, noun in registry.nouns.items()
            if name not in idle and not (noun.helps and config.noun(noun.helps).name in NOTHING_CHOSEN)
        ]

    def choice(self, noun: str, name: str, key: str, source: str = "") -> Choice:
        source = source or self._sources.get(f"{noun}.{key}", "")
        # What may not name code to import was refused when the configuration was put together.
        component = self._registry.select(noun, name, source=source, key=key, may_import=True)
        if component.component.stability == "experimental" and not self._config.plugins.experimental:
            raise ConfigValueError(
                f"{spot(f'{noun}.{key}', name, source)}: {component} is experimental: its options and results may change, and it may "
                "go away, with any version.",
                hint="Accept that with [plugins] experimental = true, or --plugins.experimental.",
            )
        objects = self._config.noun(noun).components
        return Choice(component=component, options=objects[name] if name in objects else _defaults(component))

    def choices(self) -> dict[str, Choice]:
        found = {}
        for noun in self._nouns:
            name = self._config.noun(noun).name
            if noun == "backend" and name == AUTO:
                found[noun] = self._backend()
            elif noun == "executor" and name == AUTO:
                found[noun] = self._executor()
            elif self._is_chosen(noun, name) and not (noun == "bucketing" and name == AUTO):
                found[noun] = self.choice(noun, name, "name")
        return found

    def _is_chosen(self, noun: str, name: str) -> bool:
        return name not in NOTHING_CHOSEN or (self._registry.nouns[noun].has_none and self._registry.offers(noun, name))

    def _backend(self) -> Choice:
        return self.choice(
            "backend",
            self._registry.hooks.select_backend(DEFAULT_BACKEND, lambda: self._registry.components("backend")),
            "name",
            "trencadis_select_backend",
        )

    def _executor(self) -> Choice:
        parallel = self._config.parallel
        is_divided = parallel.tensor * parallel.pipeline > 1
        return self.choice("executor", EXECUTOR_OF_RANKS if is_divided else DEFAULT_EXECUTOR, "name")

    def fallbacks(self) -> dict[str, Choice]:
        tables = {noun: self._config.noun(noun) for noun in self._nouns}
        named = {noun: table.fallback for noun, table in tables.items() if isinstance(table, NounConfig)}
        named = {noun: name for noun, name in named.items() if name not in NOTHING_CHOSEN}
        return {noun: self.choice(noun, name, "fallback") for noun, name in named.items()}

    def shadow(self) -> Choice | None:
        name = self._config.scheduling.shadow
        return None if name in NOTHING_CHOSEN else self.choice("scheduling", name, "shadow")

    def inner(self, outer: Iterable[Choice], names: tuple[str, ...] = ()) -> dict[str, Choice]:
        """Return the components that others name, and those that these name.

        Raises:
            ConfigValueError: A component names itself, perhaps by way of others.
        """
        found: dict[str, Choice] = {}
        for choice in outer:
            component, options = choice.component, choice.options
            for field in attrs.fields(type(options)) if attrs.has(type(options)) else ():
                noun, value = field.metadata.get("component"), getattr(options, field.name)
                if not noun:
                    continue
                for i, name in enumerate(value if isinstance(value, tuple) else (value,)):
                    key = f"{component.name}.{field.name}"
                    path = f"{noun}.{key}[{i}]" if isinstance(value, tuple) else f"{noun}.{key}"
                    if name not in NOTHING_CHOSEN:
                        found[path] = self._inner(component, noun, name, key, names)
                        found |= self.inner([found[path]], (*names, component.name))
        return found

    def _inner(self, outer: RegisteredComponent, noun: str, name: str, key: str, names: tuple[str, ...]) -> Choice:
        if name in (*names, outer.name):
            where = spot(f"{noun}.{key}", name, self._sources.get(f"{noun}.{key}", ""))
            raise ConfigValueError(f"{where}: it would be within itself.", hint="Name another component.")
        return self.choice(noun, name, key)

    def by_layout(self) -> dict[str, Choice]:
        if self._config.bucketing.name != AUTO:
            return {}
        return {
            layout: self.choice("bucketing", name, "name", DEFAULT)
            for layout, name in BUCKETING_BY_LAYOUT.items()
            if self._registry.offers("bucketing", name)
        }


def _check_role(plan: ResolvedPlan, role: str) -> None:
    """Raise for a role that needs a KV connector where none is chosen."""
    if role != "both" and "kv_connector" not in plan.choices:
        raise ConfigValueError(
            f"{spot('engine.role', role, plan.sources.get('engine.role', ''))}: there is no KV connector, so that nothing can be "
            "handed over.",
            hint='Set kv_connector.name, such as "p2p", or leave engine.role at "both".',
        )


def _check_shapes(plan: ResolvedPlan, layout: str) -> None:
    """Raise unless each strategy that may choose the bucket of a unified pass provides unified ones."""
    asked = {"bucketing.name": plan.choices["bucketing"]}
    if "bucketing" in plan.fallbacks:
        asked["bucketing.fallback"] = plan.fallbacks["bucketing"]
    for path, choice in asked.items():
        item = choice.component
        if layout == "unified" and UNIFIED_SHAPES not in item.component.provides:
            raise CapabilityError(
                f"{spot(path, item.name, plan.sources.get(path, ''))}: {plan.choices['backend'].component} runs prefills and decodes "
                f'in one pass and requires the capability "{UNIFIED_SHAPES}", which {item} does not provide.',
                hint=f'Set {path} to "{BUCKETING_BY_LAYOUT[layout]}", or choose another layout in the backend\'s table.',
            )


def _defaults(component: RegisteredComponent) -> Any:
    """Return a component's options where the config has none: it was not named when the config was loaded."""
    try:
        return component.component.config()
    except TypeError as error:
        raise ConfigValueError(
            f"[{component.noun}.{component.name}]: a value that {component} needs is missing: {error}.",
            hint=f"Write the table [{component.noun}.{component.name}].",
        ) from error


def _digest(facts: Mapping[str, Any]) -> str:
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=_plain)
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()


def _facts(choice: Choice) -> dict[str, Any]:
    component = choice.component
    facts: dict[str, Any] = {
        "noun": component.noun,
        "component": component.name,
        "distribution": component.provenance.distribution,
        "version": component.provenance.version,
        "options": attrs.asdict(choice.options) if attrs.has(type(choice.options)) else dict(choice.options),
    }
    if code := component.provenance.code_digest:  # what is given in code may have no file
        facts["code"] = code
    return facts


def _plain(value: Any) -> Any:
    """Return what JSON can hold for a value that it cannot."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if isinstance(value, Mapping):
        return dict(value)
    text = str(value)
    # An object without a text of its own shows its address, which differs in every process.
    return type(value).__qualname__ if f"0x{id(value):x}" in text.lower() else text
