"""Checks that every active component exists, fits the others, can be built, and reaches its store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs

from trencadis.api import (
    AUTO,
    NOTHING_CHOSEN,
    Choice,
    Config,
    Registry,
    ResolvedPlan,
    check_layout,
    resolve_plan,
)
from trencadis.clock import SystemClock
from trencadis.errors import TransferError, TrencadisError
from trencadis.interfaces import ComponentContext, ConnectorPair
from trencadis.records import BucketLimits, ModelFacts
from trencadis_tools.doctor.findings import Findings

__all__ = ["check_components"]

_NOMINAL = ModelFacts(
    architecture="unknown",
    dtype="float32",
    vocab_size=32_000,
    max_model_len=2048,
    eos_token_ids=(),
    num_parameters=0,
    weights_bytes=0,
    kv_bytes_per_token=1024,
)
"""Nominal model facts for components if the model's files have none."""


def check_components(
    found: Findings, registry: Registry, config: Config, sources: Mapping[str, str], model: ModelFacts | None
) -> None:
    """Show plugins the configuration, resolve the plan and build each of its components once.

    A KV connector's store is tested with one small object.

    Args:
        found: Findings to add to.
        registry: Registry of the plugins that can be loaded.
        config: Configuration to check.
        sources: Source of each value, by dotted path.
        model: Facts from the model's files, or None.
    """
    try:
        registry.hooks.configure(config)
    except TrencadisError as error:
        found.fail_with(error)
    try:
        plan = resolve_plan(config, registry, sources=sources)
    except TrencadisError as error:
        _check_names(found, registry, config, sources, error)
        return
    try:
        check_layout(config, plan)
    except TrencadisError as error:
        found.fail_with(error)
    context = _context(config, registry, plan, model or _NOMINAL)
    for noun, role, choice in _active(plan):
        _check_one(found, registry, context, noun, role, choice)


def _check_names(
    found: Findings, registry: Registry, config: Config, sources: Mapping[str, str], error: TrencadisError
) -> None:
    """Report every component name that no plugin offers; if all exist, report the error of their combination."""
    num_unknown = 0
    for path, name in _named(config, registry.nouns):
        noun, _, key = path.partition(".")
        if name in NOTHING_CHOSEN or name == AUTO:
            continue
        try:
            registry.select(noun, name, source=sources.get(path, ""), key=key, may_import=True)
        except TrencadisError as unknown:
            num_unknown += 1
            found.fail_with(unknown)
    if not num_unknown:
        found.fail_with(error)


def _named(config: Config, nouns: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the path and value of every setting that names a component."""
    for noun in nouns:
        if noun == "router" and config.parallel.data == 1:
            continue  # not looked up, since there is only one
        table = config.noun(noun)
        for key in ("name", "fallback", "names"):
            value = getattr(table, key, ())
            for name in (value,) if isinstance(value, str) else value:
                yield f"{noun}.{key}", name


def _active(plan: ResolvedPlan) -> Iterator[tuple[str, str, Choice]]:
    for noun, choice in plan.choices.items():
        yield noun, "active", choice
    for layout, choice in plan.by_layout.items():
        yield "bucketing", f"with a {layout} backend", choice
    for choice in plan.inner.values():
        yield choice.component.noun, "inner", choice
    for choice in plan.observers:
        yield "observer", "active", choice
    if plan.shadow is not None:
        yield "scheduling", "shadow", plan.shadow
    for noun, choice in plan.fallbacks.items():
        if choice.component != getattr(plan.choices.get(noun), "component", None):
            yield noun, "fallback", choice


def _check_one(
    found: Findings, registry: Registry, context: ComponentContext, noun: str, role: str, choice: Choice
) -> None:
    component = choice.component
    try:
        made = registry.build(component, choice.options, context)
    except TrencadisError as error:
        found.fail_with(error)
        return
    try_store = getattr(made, "try_store", None)  # by attribute, since the plugin with the class may be broken
    unusable = try_store() if try_store is not None else None
    trouble = _close(made)
    origin = component.provenance
    owner = f"{origin.distribution} {origin.version}" if origin.distribution else f"{origin.module}, no distribution"
    version = component.component.interface_version
    text = f"{noun}: {component.name}, {role}; {owner}, interface {version}, can be built"
    if unusable is not None:
        _note_store(found, choice, text, unusable)
    elif trouble:
        found.warn(f"{text}, but not closed again: {trouble}", f"Upgrade {owner}, or tell its author.")
    else:
        found.ok(text)


def _note_store(found: Findings, choice: Choice, text: str, error: TransferError) -> None:
    """Report an unusable store: a failure if the connector is required, else a warning."""
    what = f"{text}, but its store cannot be used ({error.cause}): {str(error).removesuffix(error.hint)}"
    remedy = error.hint or f"Mend it, or correct [kv_connector.{choice.component.name}]."
    if getattr(choice.options, "required", False):
        found.fail(what, f"{remedy} Nothing starts until then: required = true.")
    else:
        found.warn(what, f"{remedy} Until then serving goes on without it.")


def _close(made: Any) -> str:
    """Close the threads and connections of a built component; return the error of closing, in words."""
    target = made.worker if isinstance(made, ConnectorPair) else made
    try:
        getattr(target, "close", lambda: None)()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _context(config: Config, registry: Registry, plan: ResolvedPlan, model: ModelFacts) -> ComponentContext:
    """Return the context that components are built with: configured sizes, else nominal ones."""
    block_size = config.cache.block_size or 16
    max_model_len = config.model.max_model_len or min(model.max_model_len, 4096)
    limits = BucketLimits(
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=config.engine.max_num_seqs,
        max_num_batched_tokens=config.engine.max_num_batched_tokens,
        max_prefill_batch_size=1,
        num_blocks=config.cache.num_blocks or 4096,
        contiguous=False,
        prefix_caching=config.cache.prefix_caching,
        max_draft_tokens=0,
    )
    facts = attrs.evolve(model, max_model_len=max(model.max_model_len, 1))

    def make(noun: str, name: str) -> Any:
        choice = plan.choices[noun] if not name else plan.inner_choice(noun, name)
        return registry.build(choice.component, choice.options, context)

    context = ComponentContext(clock=SystemClock(), seed=config.engine.seed, limits=limits, model=facts, make=make)
    return context
