"""Everything an engine is made of, made by the plan: strategies, observers, and what stages use."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import attrs

from trencadis.config.schema import Config
from trencadis.engine.batching.passes import PassPlanner
from trencadis.engine.cache.block_manager import BlockManager
from trencadis.engine.sampling.requests import Sampling
from trencadis.engine.scheduling.guarded import GuardedScheduling
from trencadis.engine.scheduling.scheduler import Scheduler
from trencadis.engine.stage import EngineKinds, Made, Makings, SamplingRules, Stage
from trencadis.errors import ConfigValueError, ContractError, PluginLoadError, TrencadisError
from trencadis.faults import as_words, shown
from trencadis.interfaces import (
    BucketingStrategy,
    EvictionPolicy,
    Executor,
    Observer,
    SchedulingPolicy,
)
from trencadis.records import BucketLimits, ModelFacts, ParallelLayout
from trencadis.registry.building import Builder, Meters
from trencadis.registry.provenance import OUR_DISTRIBUTION
from trencadis.registry.stages import RegisteredStage, required_stages

__all__ = ["CommonParts", "Parts", "as_stages_leave", "make_bare_parts", "make_kinds", "make_parts", "make_stages"]

T = TypeVar("T")


@attrs.frozen(kw_only=True)
class CommonParts:
    """What every engine is made of; all there is to that of a model which generates nothing.

    Attributes:
        executor: Started: the model is loaded.
        model: The loaded model.
        observers: Names and observers.
        kept_observers: Names of those that are never switched off.
        stages: All stages that are registered, in order.
        plan_hash: Hash of the resolved plugins, versions and options.
        on_close: Called once when the engine closes, before the executor does.
    """

    executor: Executor
    model: ModelFacts
    observers: tuple[tuple[str, Observer], ...] = ()
    kept_observers: frozenset[str] = frozenset()
    stages: Sequence[RegisteredStage] = ()
    plan_hash: str = ""
    on_close: Callable[[], None] = lambda: None


@attrs.frozen(kw_only=True)
class Parts(CommonParts):
    """Everything an engine is made of, built or ready to be built.

    Attributes:
        make_bucketing: Makes the strategy and, second, its fallback (or None), from the limits.
        scheduling: Label, policy, and maker of its fallback (or None).
        make_eviction: Makes the same of another eviction policy each time, one for each part of the KV blocks.
        made: Components that stages use, by noun.
        builder: Makes components by any plan; None: the parts were made without plugins.
        shared_prefixes: Token ids of prompts' beginnings whose blocks every salt shares.
        sampling: Says what the sampler can do for a request.
        components: Name, distribution, version and digest of every component, by dotted path of the setting that names it.
        device_label: Names executor and backend in messages.
    """

    make_bucketing: Callable[[BucketLimits], tuple[str, BucketingStrategy, Callable[[], BucketingStrategy] | None]]
    scheduling: tuple[str, SchedulingPolicy, Callable[[], SchedulingPolicy] | None]
    make_eviction: Callable[[], tuple[str, EvictionPolicy, Callable[[], EvictionPolicy] | None]]
    made: Mapping[str, Made] = attrs.Factory(dict)
    builder: Builder | None = None
    shared_prefixes: tuple[tuple[int, ...], ...] = ()
    sampling: SamplingRules = attrs.Factory(SamplingRules)
    components: Mapping[str, tuple[str, str, str, str]] = attrs.Factory(dict)
    device_label: str = "the executor"


def make_bare_parts(builder: Builder, executor: Executor, model: ModelFacts) -> CommonParts:
    """Make what the engine of a model that generates nothing needs.

    Raises:
        ConfigValueError: A component is configured that such a model has no use for.
        PluginError: The built-in stages are missing.
    """
    plan = builder.plan
    for noun in _used(builder):
        if noun in plan.choices and not builder.registry.nouns[noun].helps:
            raise ConfigValueError(
                f"[{noun}] name = {plan.choices[noun].component}: {model.architecture} is an encoder, which generates nothing.",
                hint=f"Leave [{noun}] name empty, or name a model that generates in model.path.",
            )
    return CommonParts(**_common(builder, executor, model))


def make_parts(
    builder: Builder, executor: Executor, model: ModelFacts, *, shared_prefixes: tuple[tuple[int, ...], ...] = ()
) -> Parts:
    """Make every strategy that does not need the cache's size.

    Raises:
        PluginError: A component cannot be built or combined with the others, or a built-in stage is missing.
    """
    plan, sampling = builder.plan, Sampling(builder)
    return Parts(
        **_common(builder, executor, model),
        shared_prefixes=shared_prefixes,
        make_bucketing=functools.partial(_make_bucketing, builder),
        scheduling=builder.guarded("scheduling"),
        make_eviction=lambda: builder.guarded("eviction"),
        made={noun: _made(builder, noun) for noun in _used(builder) if noun in plan.choices},
        builder=builder,
        sampling=sampling.rules(model),
        components=plan.code_of(),
        device_label=builder.device_label,
    )


def _common(builder: Builder, executor: Executor, model: ModelFacts) -> dict[str, Any]:
    """Return what every engine is made of."""
    observers = builder.plan.observers
    return {
        "executor": executor,
        "model": model,
        "observers": tuple((str(choice.component), builder.make(choice)) for choice in observers),
        "kept_observers": frozenset(
            str(one.component) for one in observers if one.component.provenance.distribution == OUR_DISTRIBUTION
        ),
        "stages": required_stages(builder.config, builder.registry.stages),
        "plan_hash": builder.plan.plan_hash,
        "on_close": builder.registry.hooks.closing,
    }


def _make_bucketing(
    builder: Builder, limits: BucketLimits
) -> tuple[str, BucketingStrategy, Callable[[], BucketingStrategy] | None]:
    builder.know_limits(limits)
    return builder.guarded("bucketing")


def _used(builder: Builder) -> list[str]:
    """Return the nouns whose components stages use."""
    return sorted({noun for one in builder.registry.stages for noun in one.definition.uses})


def _made(builder: Builder, noun: str) -> Made:
    """Make the component that serves a noun."""
    label, component, make_fallback = builder.guarded(noun)
    return Made(
        label=label,
        component=component,
        make_fallback=make_fallback,
        remake=functools.partial(_made_in_rank, builder, noun),
    )


def _made_in_rank(builder: Builder, noun: str) -> tuple[Made, Meters]:
    """Make it again in the process of a rank, where a builder of the same configuration is passed."""
    return _made(builder, noun), builder.meters()


def make_stages(config: Config, parts: Parts, layout: ParallelLayout, meters: Meters) -> tuple[Stage, ...]:
    """Return the stages that the configuration asks for, in the order in which they act.

    Raises:
        ContractError: One is no stage.
        PluginLoadError: One of another distribution raised.
    """
    makings = Makings(
        config=config,
        model=parts.model,
        executor=parts.executor,
        layout=layout,
        made=parts.made.get,
        meter=meters,
        components=parts.components,
        builder=parts.builder,
        sampling=parts.sampling,
        device_label=parts.device_label,
    )
    made = []
    for one in parts.stages:
        is_own = one.provenance.distribution == OUR_DISTRIBUTION
        label, remedy = "" if is_own else str(one), one.provenance.remedy
        with _naming(label, "when", remedy):
            if not one.definition.when(config):
                continue
        with _naming(label, "make", remedy):
            stage = one.definition.make(makings)
        if stage is not None and not isinstance(stage, Stage):
            raise ContractError(
                f"{one}: its make() returned {shown(stage)}, which is no trencadis.engine.stage.Stage.", hint=remedy
            )
        if stage is not None:
            stage.name = one.definition.name
            if label:
                stage.label, stage.remedy = label, remedy
            made.append(stage)
    return tuple(made)


def make_kinds(config: Config, stages: Sequence[Stage]) -> EngineKinds:
    """Return what the engine is put together from, as its stages leave it.

    Raises:
        TrencadisError: See :func:`as_stages_leave`.
    """
    kinds = EngineKinds(
        depth=2 if config.engine.async_scheduling else 1,
        blocks=lambda *, num_blocks, make_eviction: BlockManager(num_blocks=num_blocks, eviction=make_eviction()),
        passes=PassPlanner,
        policy=lambda _, *made, **options: GuardedScheduling(*made, **options),
        scheduler=Scheduler,
    )
    return as_stages_leave(stages, "compose", kinds)


def as_stages_leave(stages: Sequence[Stage], method: str, argument: T) -> T:
    """Return what stages make of an argument before the first request, each of what the one before left.

    Raises:
        ContractError: One returned something of another type.
        PluginLoadError: One of another distribution raised.
    """
    for stage in stages:
        with _naming(stage.label, method, stage.remedy):
            found = getattr(stage, method)(argument)
        if not isinstance(found, type(argument)):
            raise ContractError(
                f"{stage.label or stage.name}: its {method}() returned {shown(found)}, where {type(argument).__name__} is expected.",
                hint=stage.remedy,
            )
        argument = found
    return argument


@contextlib.contextmanager
def _naming(label: str, method: str, remedy: str) -> Iterator[None]:
    """Name a stage of another distribution in what it raises; an error in words goes on as it is.

    Raises:
        PluginLoadError: It raised something else.
    """
    try:
        yield
    except Exception as error:
        if not label or isinstance(error, TrencadisError):
            raise
        raise PluginLoadError(f"{label} raised {as_words(error)} in {method}().", hint=remedy) from error
