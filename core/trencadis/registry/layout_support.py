"""Which features work under which layouts of ranks: one table, which the check at the start reads and the documentation is made from.

Rows of stages stand in their definitions. Rows of a backend's own settings stand in that backend, see ``trencadis_torch.parallel.support`` and ``trencadis_gaudi.parallel.support``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import attrs

from trencadis.config.messages import origin, spot
from trencadis.config.schema import Config
from trencadis.errors import CapabilityError, ConfigValueError
from trencadis.records import LayoutFeature
from trencadis.registry import RegisteredComponent, ResolvedPlan

__all__ = ["FEATURES", "LAYOUTS", "RANKS", "Layout", "check_layout", "unserved_layout"]

RANKS = "executor.ranks"
"""Capability of an executor that hosts ranks in other processes."""

_HOSTED = 'Leave executor.name at "auto", or set it to "processes".'
"""What to do where an executor hosts no ranks."""


@attrs.frozen(kw_only=True)
class Layout:
    """A way to lay ranks out.

    Attributes:
        name: Key of ``[parallel]``; of ``attention`` its value "data"; ``processes``: ranks are processes of their own, one rank too.
        summary: For the documentation.
        capabilities: Without which it is not served; the first part of each is the noun that provides it.
        hint: Says what to do instead.
    """

    name: str
    summary: str
    capabilities: tuple[str, ...] = ()
    hint: str = ""


LAYOUTS: Final = (
    Layout(
        name="processes",
        summary="a rank in a process of its own",
        capabilities=(RANKS,),
        hint=_HOSTED,
    ),
    Layout(
        name="tensor",
        summary="ranks share each layer; a backend's capabilities name the collectives that it computes with",
        capabilities=(RANKS,),
        hint=_HOSTED,
    ),
    Layout(
        name="pipeline",
        summary="ranks have some layers each",
        capabilities=(RANKS, "backend.pipeline"),
        hint="Set it to 1, and tensor to the number of ranks.",
    ),
    Layout(
        name="expert",
        summary="ranks have some experts each",
        capabilities=(RANKS, "backend.expert"),
        hint="Set it to 1: then every rank has a share of each expert.",
    ),
    Layout(
        name="attention",
        summary="ranks have the attention of some sequences each, beside some experts",
        capabilities=(RANKS, "backend.data_attention"),
        hint='Set it to "tensor".',
    ),
    Layout(name="data", summary="copies, each an engine of its own"),
)

FEATURES: Final = (
    LayoutFeature(name="Scheduling, eviction, bucketing, observers: any strategy"),
    LayoutFeature(name="Steps planned ahead", setting="engine.async_scheduling", unless=(False,)),
    LayoutFeature(name="Prefix caching", setting="cache.prefix_caching", unless=(False,)),
    LayoutFeature(name="Seeds, penalties, several outputs, beam search"),
    LayoutFeature(name="Log-probabilities of outputs and prompts"),
    LayoutFeature(name="Structured output"),
    LayoutFeature(name="The engine in a process of its own", setting="engine.placement", unless=("auto", "thread")),
)
"""What the core has settings for, or requests, without stages; in the order of the documentation."""


def unserved_layout(
    plan: ResolvedPlan, name: str, size: int, *, nouns: Collection[str] = ("executor", "backend")
) -> str:
    """Return why the chosen components serve no layout of that kind and size; empty: they do, as far as is known before the start. Pure.

    Args:
        plan: The components.
        name: One of :data:`LAYOUTS`.
        size: Value in ``[parallel]``; 1 asks for nothing.
        nouns: Whose components are asked.
    """
    layout = next(one for one in LAYOUTS if one.name == name)
    for capability in layout.capabilities if size > 1 else ():
        noun = capability.partition(".")[0]
        if noun in nouns and capability not in plan.choices[noun].component.component.provides:
            return f'{plan.choices[noun].component} does not provide "{capability}"'
    return ""


def check_layout(config: Config, plan: ResolvedPlan) -> None:
    """Refuse sizes that no layout has, layouts that the components do not serve, and features that do not go with them.

    Raises:
        ConfigValueError: Sizes contradict each other.
        CapabilityError: Something is not served.
    """
    sizes = config.parallel
    if sizes.expert not in (1, sizes.tensor):
        raise ConfigValueError(
            f"{_spot(plan, 'parallel.expert', sizes.expert)} with tensor = {sizes.tensor}: experts are divided over the ranks of a stage.",
            hint=f"Set it to 1, where every rank holds a share of each expert, or to {sizes.tensor}.",
        )
    if sizes.attention == "data":
        _check_data_attention(config, plan)
    _check_features(config, plan)


def _check_data_attention(config: Config, plan: ResolvedPlan) -> None:
    sizes, num_rows = config.parallel, config.engine.max_num_seqs
    where = _spot(plan, "parallel.attention", "data")
    if sizes.expert == 1:
        raise ConfigValueError(
            f"{where} with tensor = {sizes.tensor} and expert = 1: ranks that have different tokens share nothing but whole experts.",
            hint='Set tensor and expert to the number of ranks, or attention to "tensor".',
        )
    if sizes.pipeline > 1:
        raise CapabilityError(
            f"{where} with pipeline = {sizes.pipeline}: stages of ranks that have different tokens are not built.",
            hint='Set pipeline to 1, or attention to "tensor".',
        )
    if num_rows % sizes.tensor:
        raise ConfigValueError(
            f"{_spot(plan, 'engine.max_num_seqs', num_rows)} with {where}: it is no multiple of the {sizes.tensor} ranks, each of which runs as many.",
            hint=f"Set it to {num_rows // sizes.tensor * sizes.tensor or sizes.tensor}, for instance.",
        )


def _check_features(config: Config, plan: ResolvedPlan) -> None:
    """Refuse layouts that the chosen components do not serve, and features that do not go with the layout.

    Raises:
        CapabilityError: With what to set instead.
    """
    sizes = {"processes": 1 + (RANKS in plan.choices["executor"].component.component.provides)}
    sizes |= {name: getattr(config.parallel, name) for name in ("tensor", "pipeline", "expert", "data")}
    sizes["attention"] = config.parallel.tensor if config.parallel.attention == "data" else 1
    for layout in LAYOUTS:
        why = unserved_layout(plan, layout.name, sizes[layout.name])
        if why:
            asked = "data" if layout.name == "attention" else sizes[layout.name]
            where = _spot(plan, f"parallel.{layout.name}", asked)
            hint = _HOSTED if RANKS in why else layout.hint
            raise CapabilityError(f"{where}: {why}.", hint=hint)
    for feature in (*FEATURES, *plan.stage_features):
        refused = [name for name, size in sizes.items() if size > 1 and name in feature.refused]
        if not refused or not feature.is_asked(value := _value(config, feature.setting)):
            continue
        table, key = feature.setting.split(".")
        for name in refused:
            capability = feature.unless_provides.get(name, "")
            lacking = _lacking(plan, table, capability) if capability else None
            if capability and lacking is None:
                continue
            shown = lacking or (plan.choices[table].component if key == "name" and table in plan.choices else value)
            source = origin(plan.sources.get(feature.setting, ""))
            raise CapabilityError(f"[{table}] {key} = {shown}{source}: {feature.refused[name]}.", hint=feature.remedy)


def _spot(plan: ResolvedPlan, path: str, value: object) -> str:
    """Return a setting with its value and who set it."""
    return spot(path, value, plan.sources.get(path, ""))


def _lacking(plan: ResolvedPlan, noun: str, capability: str) -> RegisteredComponent | None:
    """Return a component of a noun, chosen or named by the one that is, that does not provide a capability; None if all do."""
    chosen = plan.choices.get(noun)
    found = [chosen, *(one for one in plan.inner.values() if one.component.noun == noun)] if chosen is not None else []
    return next((one.component for one in found if capability not in one.component.component.provides), None)


def _value(config: Config, setting: str) -> object:
    table, key = setting.split(".")
    return getattr(getattr(config, table), key)
