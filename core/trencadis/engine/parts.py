"""Everything an engine is made of, made by the plan: strategies, observers, and what stages use."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import attrs

from trencadis.config.schema import Config
from trencadis.engine.batching.passes import PassPlanner
from trencadis.engine.cache.block_manager import BlockManager
from trencadis.engine.sampling.requests import Sampling
from trencadis.engine.scheduling.guarded import GuardedScheduling
from trencadis.engine.scheduling.scheduler import Scheduler
from trencadis.engine.speculation.components import make_speculation
from trencadis.engine.speculation.drafting import Speculation
from trencadis.engine.stage import EngineKinds, Made, Makings, Stage
from trencadis.errors import ConfigValueError, ContractError
from trencadis.faults import shown
from trencadis.interfaces import (
    BucketingStrategy,
    EvictionPolicy,
    Executor,
    Observer,
    SamplingFingerprint,
    SchedulingPolicy,
)
from trencadis.records import BucketLimits, ModelFacts, ParallelLayout, RowStart, SamplingParams
from trencadis.registry.building import Builder, Meters
from trencadis.registry.provenance import OUR_DISTRIBUTION
from trencadis.registry.stages import RegisteredStage, required_stages

__all__ = ["CommonParts", "Parts", "make_bare_parts", "make_kinds", "make_parts", "make_stages"]


@attrs.frozen(kw_only=True)
class CommonParts:
    """What every engine is made of; all there is to that of a model which generates nothing.

    Attributes:
        executor: Started: the model is loaded.
        model: What was loaded.
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
        speculation: Who drafts, how much, and which drafts stand; or None.
        made: Components that stages use, by noun.
        builder: Makes components by any plan; None: the parts were made without plugins.
        shared_prefixes: Token ids of prompts' beginnings whose blocks every salt shares.
        check_params: Refuses processors that a request names and the sampler does not have.
        prepare: Begins what the sampler has to do before a request can run.
        can_start_with: Whether the sampler could have chosen a token for a sequence at the end of its prompt.
        is_portable: Whether a sequence with these parameters may go on here after tokens that another engine chose.
        components: Name, distribution, version and digest of every component, by dotted path of the setting that names it.
        device_label: Names executor and backend in messages.
        sampling_fingerprint: Tells another engine how tokens are chosen here; None: none is to choose one.
    """

    make_bucketing: Callable[[BucketLimits], tuple[str, BucketingStrategy, Callable[[], BucketingStrategy] | None]]
    scheduling: tuple[str, SchedulingPolicy, Callable[[], SchedulingPolicy] | None]
    make_eviction: Callable[[], tuple[str, EvictionPolicy, Callable[[], EvictionPolicy] | None]]
    speculation: Speculation | None = None
    made: Mapping[str, Made] = attrs.Factory(dict)
    builder: Builder | None = None
    shared_prefixes: tuple[tuple[int, ...], ...] = ()
    check_params: Callable[[SamplingParams], None] = lambda _: None
    prepare: Callable[[SamplingParams, str], tuple[Future[Any], ...]] = lambda _, __: ()
    can_start_with: Callable[[RowStart, int], bool] = lambda _, __: True
    is_portable: Callable[[SamplingParams], bool] = lambda _: True
    sampling_fingerprint: SamplingFingerprint | None = None
    components: Mapping[str, tuple[str, str, str, str]] = attrs.Factory(dict)
    device_label: str = "the executor"


def make_bare_parts(builder: Builder, executor: Executor, model: ModelFacts) -> CommonParts:
    """Make what the engine of a model that generates nothing needs.

    Raises:
        ConfigValueError: A component is configured that such a model has no use for.
        PluginError: The built-in stages are missing.
    """
    plan = builder.plan
    for noun in ("speculation", *_used(builder)):
        if noun in plan.choices:
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
        speculation=make_speculation(builder, sampling),
        made={noun: _made(builder, noun) for noun in _used(builder) if noun in plan.choices},
        builder=builder,
        check_params=sampling.check,
        prepare=sampling.prepare,
        can_start_with=sampling.can_start_with,
        is_portable=sampling.is_portable,
        sampling_fingerprint=sampling.fingerprint(model),
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
    return Made(
        label=builder.label(noun),
        component=builder.make(builder.plan.choices[noun]),
        remake=functools.partial(_made_in_rank, builder, noun),
    )


def _made_in_rank(builder: Builder, noun: str) -> tuple[Made, Meters]:
    """Make it again in the process of a rank, where a builder of the same configuration is passed."""
    return _made(builder, noun), builder.meters()


def make_stages(config: Config, parts: Parts, layout: ParallelLayout, meters: Meters) -> tuple[Stage, ...]:
    """Return the stages that the configuration asks for, in the order in which they act.

    Raises:
        ContractError: One is no stage.
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
        sampling_fingerprint=parts.sampling_fingerprint,
        can_start_with=parts.can_start_with,
        is_portable=parts.is_portable,
        prepare=parts.prepare,
        device_label=parts.device_label,
    )
    made = []
    for one in parts.stages:
        if not one.definition.when(config):
            continue
        stage = one.definition.make(makings)
        if stage is not None and not isinstance(stage, Stage):
            raise ContractError(
                f"{one}: its make() returned {shown(stage)}, which is no trencadis.engine.stage.Stage.",
                hint=one.provenance.remedy,
            )
        if stage is not None:
            stage.name = one.definition.name
            if one.provenance.distribution != OUR_DISTRIBUTION:
                stage.label, stage.remedy = str(one), one.provenance.remedy
            made.append(stage)
    return tuple(made)


def make_kinds(config: Config, stages: Sequence[Stage], *, has_drafter: bool) -> EngineKinds:
    """Return what the engine is put together from, as its stages leave it.

    Raises:
        ContractError: A stage returned something else.
    """
    # Drafts are made from committed tokens only, so a step with drafts cannot be planned ahead of one with the same sequences.
    depth = 1 if has_drafter or not config.engine.async_scheduling else 2
    kinds = EngineKinds(
        depth=depth,
        blocks=lambda *, num_blocks, make_eviction: BlockManager(num_blocks=num_blocks, eviction=make_eviction()),
        passes=PassPlanner,
        policy=lambda _, *made, **options: GuardedScheduling(*made, **options),
        scheduler=Scheduler,
    )
    for stage in stages:
        found: object = stage.compose(kinds)
        if not isinstance(found, EngineKinds):
            raise ContractError(
                f"{stage.label or stage.name}: its compose() returned {shown(found)}, where EngineKinds are expected.",
                hint=stage.remedy,
            )
        kinds = found
    return kinds
