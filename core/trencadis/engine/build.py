"""The composition root: config and registry in, engine out.

Live serving, replay and simulation differ only in what is handed in: clock, backend, executor.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from trencadis.activity import ACTIVITY
from trencadis.clock import Clock, HeldClock, Phases, SystemClock
from trencadis.config.schema import Config
from trencadis.engine.batching.passes import BatchBuilder, PassPlanner
from trencadis.engine.batching.warmup import check_misses, listed_buckets, wanted_covering_buckets, warm_up
from trencadis.engine.cache.cache_size import limits_of, limits_of_part, longest_sequence, size_cache, without_sharing
from trencadis.engine.cache.guarded import GuardedEviction
from trencadis.engine.cache.hashing import BlockHasher, compatibility_of
from trencadis.engine.commit.recovery import restart_ranks
from trencadis.engine.engine import Engine
from trencadis.engine.guard import Guarded
from trencadis.engine.guarded_stage import guarded
from trencadis.engine.inspect.accounting import Accounting
from trencadis.engine.inspect.observers import Observers
from trencadis.engine.inspect.off import off_metrics, off_table
from trencadis.engine.parts import (
    CommonParts,
    Parts,
    as_stages_leave,
    make_bare_parts,
    make_kinds,
    make_parts,
    make_stages,
)
from trencadis.engine.request_validation import RequestValidator
from trencadis.engine.sampling.requests import make_sampler
from trencadis.engine.scheduling.guarded import GuardedScheduling
from trencadis.engine.stage import AnyEngine, BareParts, EngineKinds, Stage, Stages
from trencadis.engine.state import EngineState
from trencadis.errors import PluginError, TrencadisError
from trencadis.faults import reraise_interrupt
from trencadis.interfaces import (
    AllocationPlan,
    BucketingStrategy,
    ComponentContext,
    Executor,
)
from trencadis.records import (
    BucketLimits,
    ModelSource,
    ParallelLayout,
    WarmUp,
)
from trencadis.registry import Registry, resolve_plan
from trencadis.registry.building import Builder, Meters, budget_of
from trencadis.registry.layout_support import check_layout
from trencadis.startup import LEDGER, end_start, is_own_process, rare_collections, release_freed
from trencadis.text import model_finder, read_prefixes, resolve_model_path, vocabulary_reader

__all__ = ["build_engine", "component_context", "compose_bare_engine", "compose_engine"]

logger = logging.getLogger("trencadis.engine")

T = TypeVar("T")


def build_engine(
    config: Config,
    *,
    registry: Registry,
    clock: Clock | None = None,
    progress: Callable[[int, int], None] | None = None,
    executor: Executor | None = None,
    kind: type[Engine] = Engine,
) -> AnyEngine:
    """Resolve the configured components, load the model, and return an engine that is ready for requests.

    A stage makes the engine of a model that generates nothing, such as an encoder.

    Args:
        config: The configuration.
        registry: The plugins.
        clock: The system's if none is given.
        progress: Called during warm-up with buckets done and all.
        executor: In the place of the configured one; it need not use the configured backend.
        kind: Class of an engine that generates.

    Raises:
        PluginError: A component cannot be chosen, built or combined with the others.
        ModelLoadError: The model cannot be loaded.
        ConfigValueError: A size, or a component that needs tokens, contradicts the model.
        OutOfMemoryError: No room for weights or KV cache.
    """
    clock = clock or SystemClock()
    # A simulated clock stands still while an engine is built.
    phases = Phases(SystemClock(), "components")
    with rare_collections():
        engine = _build(config, registry, clock=clock, progress=progress, executor=executor, kind=kind, phases=phases)
    release_freed()
    # A simulated fleet may build thousands of engines.
    logger.log(logging.INFO if isinstance(clock, SystemClock) else logging.DEBUG, "The engine took %s.", phases.end())
    if isinstance(clock, SystemClock):
        end_start(config.model.path)
    return engine


def _build(
    config: Config,
    registry: Registry,
    *,
    clock: Clock,
    progress: Callable[[int, int], None] | None,
    executor: Executor | None,
    kind: type[Engine],
    phases: Phases,
) -> AnyEngine:
    registry.hooks.configure(config)
    plan = resolve_plan(config, registry)
    for choice in plan.choices.values():
        registry.prepare(choice.component, choice.options)
    registry.left_out.warn()
    check_layout(config, plan)
    builder = Builder(registry, plan, config, component_context(config, clock), context_of=component_context)
    if executor is None:
        executor = builder.make(plan.choices["executor"])
        builder.device_label = " with ".join(str(plan.choices[noun].component) for noun in ("executor", "backend"))
    else:
        builder.device_label = f"executor {type(executor).__name__}"
    try:
        phases.begin("backend and model")
        LEDGER.begin("imports")
        ACTIVITY.begin_part("imports")  # the longest of what comes before the backend names its own
        model = builder.start(executor, _source(config), functools.partial(make_sampler, builder))
        engine: AnyEngine
        phases.begin("strategies")
        if model.generates:
            parts = make_parts(builder, executor, model, shared_prefixes=read_prefixes(config))
            phases.begin("cache and warm-up")
            engine = compose_engine(config, parts, clock=clock, progress=progress, kind=kind)
        else:
            engine = compose_bare_engine(config, make_bare_parts(builder, executor, model), clock=clock)
    except BaseException as error:
        with contextlib.suppress(Exception):  # what went wrong first is reported
            executor.close()
        reraise_interrupt(error)
        attributed = None if isinstance(error, TrencadisError) else builder.attribute(error)
        if attributed is None:
            raise
        raise attributed from error
    builder.started()
    registry.hooks.ready(model, engine.plan_hash)
    return engine


def component_context(config: Config, clock: Clock) -> ComponentContext:
    """Return what every factory is told. Pure."""
    return ComponentContext(
        clock=clock,
        seed=config.engine.seed,
        quarantine_s=config.cache.release_timeout_s,
        budget_s=lambda noun: budget_of(config, noun),
        layout=_layout(config),
        vocabulary=vocabulary_reader(config),
        named_model=model_finder(config),
        replica=config.parallel.replica,
        num_replicas=config.parallel.data,
        own_process=is_own_process(),
    )


def _layout(config: Config) -> ParallelLayout:
    sizes = config.parallel
    return ParallelLayout(tensor=sizes.tensor, pipeline=sizes.pipeline, expert=sizes.expert, attention=sizes.attention)


def _source(config: Config) -> ModelSource:
    model = config.model
    return ModelSource(
        path=str(resolve_model_path(model.path)),
        dtype=model.dtype,
        revision=model.revision,
        trust_remote_code=model.trust_remote_code,
        pooling=config.embedding.pooling,
        normalize_embeddings=config.embedding.normalize,
        head=str(resolve_model_path(model.head)) if model.head else "",
        remember=config.cache.models == "on",
    )


def _watched(config: Config, parts: CommonParts, clock: Clock) -> Observers:
    return Observers(parts.observers, clock=clock, budget_ms=config.observer.budget_ms, kept=parts.kept_observers)


def compose_engine(
    config: Config,
    parts: Parts,
    *,
    clock: Clock | None = None,
    progress: Callable[[int, int], None] | None = None,
    kind: type[Engine] = Engine,
) -> Engine:
    """Size the cache, allocate, warm up, and put the engine together.

    Args:
        config: Tables ``engine``, ``cache`` and ``model`` are read.
        parts: The strategies.
        clock: The system's if none is given.
        progress: Called during warm-up with buckets done and all.
        kind: Class of the engine.

    Raises:
        ConfigValueError: A size contradicts the model or another size.
        OutOfMemoryError: The device has no room for a usable KV cache.
    """
    clock = clock or SystemClock()
    executor, capabilities = parts.executor, parts.executor.capabilities
    config = without_sharing(config, capabilities)
    block_size = config.cache.block_size or capabilities.default_block_size
    meters = Meters(config, clock)
    stages = make_stages(config, parts, _layout(config), meters)
    kinds = make_kinds(config, stages)
    max_model_len, num_blocks = size_cache(
        config,
        parts.model,
        executor,
        block_size=block_size,
        num_parts=kinds.num_parts,
        further_bytes=kinds.kv_bytes_per_token,
    )
    limits = limits_of(config, capabilities, block_size, max_model_len, num_blocks, kinds.num_to_verify)
    executor.allocate(_allocation(config, limits, stages))
    state = _state(config, parts, kinds, HeldClock(clock), limits, meters)
    part_limits = limits_of_part(limits, kinds.num_parts)
    made = parts.make_bucketing(part_limits)
    bucketing = Guarded(BucketingStrategy, *made, meter=meters("bucketing", made[0]))
    passes: PassPlanner = kinds.passes(
        bucketing,
        capabilities=capabilities,
        table=state.table,
        limits=part_limits,
        refuse_unprepared=config.bucketing.on_miss == "refuse",
    )
    warmed = _warm_up(config, executor, bucketing, passes, part_limits, clock=clock, progress=progress)
    policy = _policy(parts, kinds, state, meters)
    scheduler = kinds.scheduler(
        state,
        policy,
        max_num_batched_tokens=config.engine.max_num_batched_tokens,
        max_preemptions=config.engine.max_preemptions,
        max_wait_s=config.engine.max_wait_s,
    )
    engine = kind(
        state=state,
        scheduler=scheduler,
        batches=BatchBuilder(state, passes, warmed),
        executor=executor,
        validator=RequestValidator(state, policy, parts.model, parts.sampling),
        stages=Stages(stages, guard=guarded),
        accounting=Accounting(state, _watched(config, parts, clock), label=parts.device_label),
        depth=kinds.depth,
        on_close=parts.on_close,
    )
    engine.bind(config, limits)
    return engine


def _warm_up(
    config: Config,
    executor: Executor,
    bucketing: Guarded[BucketingStrategy],
    passes: PassPlanner,
    limits: BucketLimits,
    *,
    clock: Clock,
    progress: Callable[[int, int], None] | None,
) -> WarmUp:
    """Prepare buckets, and return what was prepared."""
    warmed = WarmUp()
    if executor.capabilities.layout != "ragged":
        buckets = listed_buckets(bucketing, limits) if config.engine.warmup else ()
        if not config.engine.warmup:
            logger.info("engine.warmup is off: each bucket is compiled when a step first needs it.")
        check_misses(config, bucketing, buckets)
        covering = wanted_covering_buckets(config.bucketing, bucketing.ask.bucket_for, buckets, limits)
        warmed = warm_up(executor, (*buckets, *covering), clock=clock, progress=progress)
        passes.prepared(warmed.report.prepared)
        passes.cover(buckets, covering)
    return warmed


def compose_bare_engine(config: Config, parts: CommonParts, *, clock: Clock | None = None) -> AnyEngine:
    """Have a stage make the engine of a model that generates nothing; there is no cache to size and nothing to warm up.

    Args:
        config: Tables ``engine`` and ``model`` are read.
        parts: The executor, who watches, and the stages.
        clock: The system's if none is given.

    Raises:
        ConfigValueError: ``model.max_model_len`` exceeds the model's own.
        PluginError: No stage serves such a model.
    """
    executor, model = parts.executor, parts.model
    observers = _watched(config, parts, clock or SystemClock())
    makers = [one.definition.make_engine for one in parts.stages if one.definition.make_engine is not None]
    if not makers:
        raise PluginError(
            f"{model.architecture} generates nothing, and no stage serves such a model.",
            hint="Install trencadis again, or name a model that generates in model.path.",
        )

    def close() -> None:
        observers.close()
        try:
            parts.on_close()
        finally:
            executor.close()

    engine: AnyEngine = makers[0](
        BareParts(
            config=config,
            executor=executor,
            model=model,
            max_model_len=longest_sequence(config, model),
            plan_hash=parts.plan_hash,
            metrics=lambda: observers.metrics() + off_metrics(),
            switched_off=off_table,
            restart=functools.partial(restart_ranks, executor),
            close=close,
        )
    )
    return engine


def _allocation(config: Config, limits: BucketLimits, stages: Sequence[Stage]) -> AllocationPlan:
    """Return what is to be allocated, the stages' wishes included."""
    plan = AllocationPlan(
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        num_rows=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        layer_wait_s=config.cache.layer_wait_s,
    )
    return as_stages_leave(stages, "allocate", plan)


def _policy(parts: Parts, kinds: EngineKinds, state: EngineState, meters: Meters) -> GuardedScheduling:
    policy: GuardedScheduling = kinds.policy(state, *parts.scheduling, meter=meters("scheduling", parts.scheduling[0]))
    policy.live = lambda: [(slot, state.table.sequence(slot).request) for slot in state.slot_of.values()]
    if parts.builder is not None:
        policy.name = parts.builder.plan.choices["scheduling"].component.name
    return policy


def _state(
    config: Config, parts: Parts, kinds: EngineKinds, clock: HeldClock, limits: BucketLimits, meters: Meters
) -> EngineState:
    def make_eviction() -> GuardedEviction:
        label, policy, make_fallback = parts.make_eviction()
        return GuardedEviction(label, policy, make_fallback, meter=meters("eviction", label))

    return EngineState(
        clock=clock,
        blocks=kinds.blocks(num_blocks=limits.num_blocks, make_eviction=make_eviction),
        hasher=BlockHasher(
            key=config.cache.key,
            compatibility=compatibility_of(config, parts.model, limits.block_size),
            block_size=limits.block_size,
            shared_prefixes=parts.shared_prefixes,
        ),
        num_rows=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        block_size=limits.block_size,
        eos_token_ids=parts.model.eos_token_ids,
        seed=config.engine.seed,
        prefix_caching=config.cache.prefix_caching,
        plan_hash=parts.plan_hash,
    )
