"""An engine from its parts: sizes the KV cache, allocates, warms up, and wires everything together."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import attrs

from trencadis.activity import ACTIVITY, Lane
from trencadis.clock import Clock, SystemClock
from trencadis.config.schema import Config
from trencadis.engine.batching.batch_builder import BatchBuilder
from trencadis.engine.batching.covering_buckets import closing_buckets
from trencadis.engine.batching.passes import PassPlanner
from trencadis.engine.batching.warmup import BackgroundWarmUp, WarmUp, warm_up
from trencadis.engine.cache.block_manager import BlockManager
from trencadis.engine.cache.cache_size import longest_sequence, size_cache
from trencadis.engine.cache.defragmenter import Defragmenter
from trencadis.engine.cache.hashing import BlockHasher
from trencadis.engine.cache.swapping import Swapping, num_host_blocks
from trencadis.engine.composition_checks import (
    check_adapters,
    check_drafter,
    check_misses,
    check_trees,
    with_drafter,
    without_sharing,
)
from trencadis.engine.embedding import EmbeddingQueue
from trencadis.engine.embedding_engine import EmbeddingEngine
from trencadis.engine.engine import Engine
from trencadis.engine.guards import GuardedBucketing, GuardedEviction, GuardedScheduling
from trencadis.engine.inspect.administration import Administration
from trencadis.engine.inspect.decisions import Decisions
from trencadis.engine.inspect.observers import Observers
from trencadis.engine.scheduling.scheduler import Scheduler
from trencadis.engine.scheduling.shadow import Shadow
from trencadis.engine.scheduling.switch import SchedulingSwitch
from trencadis.engine.speculation.drafting import Drafting, Speculation
from trencadis.engine.state import EngineState
from trencadis.engine.transfer.first_tokens import FirstTokens
from trencadis.engine.transfer.guarded_connector import GuardedConnector, GuardedWorker
from trencadis.engine.transfer.role import EngineRole
from trencadis.engine.transfer.transfers import Transfers
from trencadis.errors import ConfigValueError, ContractError
from trencadis.faults import CallMeter
from trencadis.interfaces import (
    AllocationPlan,
    BackendCapabilities,
    BucketingStrategy,
    ConnectorPair,
    EvictionPolicy,
    Executor,
    FirstTokenTerms,
    Observer,
    SchedulingPolicy,
)
from trencadis.records import Bucket, BucketLimits, ModelFacts, RowStart, SamplingParams
from trencadis.wording import shown

__all__ = ["EmbeddingParts", "Meters", "Parts", "budget_of", "compose_embedding_engine", "compose_engine"]

logger = logging.getLogger("trencadis.engine")

_FORGIVEN = {"speculation": 4}
"""Slow calls that are only warned about, by noun: the first ones of a draft model may compile."""

_MAX_BUCKETS = 100_000
"""More would take days to prepare."""


@attrs.frozen(kw_only=True)
class EmbeddingParts:
    """What every engine is made of; all there is to that of an encoder.

    Attributes:
        executor: Started: the model is loaded.
        model: What was loaded.
        observers: Names and observers.
        plan_hash: Of the resolved plugins.
        on_close: Called once when the engine closes, before the executor does.
    """

    executor: Executor
    model: ModelFacts
    observers: tuple[tuple[str, Observer], ...] = ()
    plan_hash: str = ""
    on_close: Callable[[], None] = lambda: None


@attrs.frozen(kw_only=True)
class Parts(EmbeddingParts):
    """Everything an engine is made of, built or ready to be built.

    Attributes:
        make_bucketing: Makes the strategy and, second, its fallback (or None), from the limits.
        scheduling: Label, policy, and maker of its fallback (or None).
        eviction: The same.
        speculation: Who drafts, how much, and which drafts stand; or None.
        connector: The KV connector, or None.
        connector_label: Names it and its distribution in messages.
        shadow: Label and policy that is asked beside ``scheduling``, or None.
        switch: Builds other policies while the engine serves, or None.
        shared_prefixes: Token ids of prompts' beginnings whose blocks every tenant shares.
        check_params: Refuses processors that a request names and the sampler does not have.
        prepare: Begins what the sampler has to do before a request can run.
        may_begin: Whether the sampler could have chosen a token for a sequence at the end of its prompt.
        device_label: Names executor and backend in messages.
        first_token_terms: What the connector carries to another engine that is to choose a first token; None: none does.
    """

    make_bucketing: Callable[[BucketLimits], tuple[str, BucketingStrategy, Callable[[], BucketingStrategy] | None]]
    scheduling: tuple[str, SchedulingPolicy, Callable[[], SchedulingPolicy] | None]
    eviction: tuple[str, EvictionPolicy, Callable[[], EvictionPolicy] | None]
    speculation: Speculation | None = None
    connector: ConnectorPair | None = None
    connector_label: str = "the KV connector"
    shadow: tuple[str, SchedulingPolicy] | None = None
    switch: SchedulingSwitch | None = None
    shared_prefixes: tuple[tuple[int, ...], ...] = ()
    check_params: Callable[[SamplingParams], None] = lambda _: None
    prepare: Callable[[SamplingParams, str], tuple[Future[Any], ...]] = lambda _, __: ()
    may_begin: Callable[[RowStart, int], bool] = lambda _, __: True
    first_token_terms: FirstTokenTerms | None = None
    device_label: str = "the executor"


class Meters:
    """Makes what measures the calls of components: each by the budget of its noun, on the engine's clock.

    Args:
        config: Table ``budget`` is read.
        clock: The engine's.
    """

    def __init__(self, config: Config, clock: Clock) -> None:
        self._config = config
        self._clock = clock

    def __call__(self, noun: str, label: str, *, lane: Lane | None = None) -> CallMeter:
        """Return the meter of a component; ``lane`` as of :class:`~trencadis.faults.CallMeter`."""
        return CallMeter(
            label,
            clock=self._clock,
            budget_s=budget_of(self._config, noun),
            setting=f"[budget] {noun}_ms",
            lane=lane,
            num_forgiven=_FORGIVEN.get(noun, 0),
        )


def budget_of(config: Config, noun: str) -> float:
    """Return how long a call of a component may take, seconds; infinity if that is not limited. Pure."""
    budget_ms: float = getattr(config.budget, f"{noun}_ms", 0.0)
    return budget_ms / 1000 or math.inf


def compose_engine(
    config: Config,
    parts: Parts,
    *,
    clock: Clock | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Engine:
    """Size the cache, allocate, warm up, and put the engine together.

    Args:
        config: Tables ``engine``, ``cache`` and ``model`` are read.
        parts: The strategies.
        clock: The system's if none is given.
        progress: Called during warm-up with buckets done and all.

    Raises:
        ConfigValueError: A size contradicts the model or another size.
        OutOfMemoryError: The device has no room for a usable KV cache.
    """
    clock = clock or SystemClock()
    executor, capabilities = parts.executor, parts.executor.capabilities
    config = without_sharing(config, capabilities)
    check_adapters(config, capabilities)
    block_size = config.cache.block_size or capabilities.default_block_size
    drafter = parts.speculation.speculator if parts.speculation else None
    check_drafter(parts.speculation)
    check_trees(parts.speculation, capabilities)
    max_drafts = drafter.max_draft_tokens if drafter else 0
    max_model_len, num_blocks = size_cache(config, with_drafter(parts.model, drafter), executor, block_size=block_size)
    limits = _limits(config, capabilities, block_size, max_model_len, num_blocks, max_drafts)
    meters = Meters(config, clock)
    num_hosted = num_host_blocks(config, parts.model, executor, block_size=block_size, max_model_len=max_model_len)
    _allocate(executor, _allocation(config, limits, parts, num_hosted, meters), parts)
    swapping = Swapping(num_host_blocks=num_hosted, copy=lambda outs, ins: executor.swap_blocks(outs=outs, ins=ins))
    state = _state(config, parts, clock, swapping, limits, meters)
    made = parts.make_bucketing(limits)
    bucketing = GuardedBucketing(*made, meter=meters("bucketing", made[0]))
    passes, warmed = _warmed_passes(config, executor, bucketing, state, limits, clock=clock, progress=progress)
    drafting = Drafting(
        state,
        parts.speculation,
        padded_tokens=passes.padded_tokens,
        pads=capabilities.layout == "padded",
        vocab_size=parts.model.vocab_size,
        meter_of=meters,
    )
    drafting.allocate(limits)
    policy = _policy(parts, state, meters)
    decisions = Decisions(config.engine.explain_steps)
    return Engine(
        state=state,
        policy=policy,
        scheduler=_scheduler(config, state, policy, decisions),
        builder=BatchBuilder(state, passes),
        executor=executor,
        observers=Observers(parts.observers, clock=clock, budget_ms=config.observer.budget_ms),
        drafting=drafting,
        defragmenter=_defragmenter(config, capabilities, state, executor),
        embeddings=EmbeddingQueue(
            executor,
            parts.model,
            max_model_len=max_model_len,
            max_num_batched_tokens=config.engine.max_num_batched_tokens,
        ),
        model=parts.model,
        # Drafts are made from committed tokens only, so a step with drafts cannot be planned ahead.
        depth=2 if config.engine.async_scheduling and drafter is None else 1,
        administration=_administration(config, parts, state, policy, decisions),
        warm_up=warmed,
        background=BackgroundWarmUp(executor, passes, warmed) if warmed.report.num_deferred else None,
        on_close=parts.on_close,
        check_params=parts.check_params,
        device_label=parts.device_label,
        prepare=parts.prepare,
    )


def _scheduler(config: Config, state: EngineState, policy: GuardedScheduling, decisions: Decisions) -> Scheduler:
    return Scheduler(
        state,
        policy,
        max_num_batched_tokens=config.engine.max_num_batched_tokens,
        max_preemptions=config.engine.max_preemptions,
        max_wait_s=config.engine.max_wait_s,
        decisions=decisions,
    )


def _warmed_passes(
    config: Config,
    executor: Executor,
    bucketing: GuardedBucketing,
    state: EngineState,
    limits: BucketLimits,
    *,
    clock: Clock,
    progress: Callable[[int, int], None] | None,
) -> tuple[PassPlanner, WarmUp]:
    """Return what gives passes their buckets, and what was prepared of these."""
    passes = PassPlanner(
        bucketing,
        capabilities=executor.capabilities,
        table=state.table,
        block_size=limits.block_size,
        max_num_batched_tokens=config.engine.max_num_batched_tokens,
        refuse_unprepared=config.bucketing.on_miss == "refuse",
    )
    warmed = WarmUp()
    if executor.capabilities.layout != "ragged":
        buckets = _table(bucketing, limits) if config.engine.warmup else ()
        if not config.engine.warmup:
            logger.info("Skipping warmup...")
        check_misses(config, bucketing, buckets)
        closing = closing_buckets(bucketing.bucket_for, buckets, limits) if _closes(config, buckets, limits) else ()
        warmed = warm_up(executor, (*buckets, *closing), clock=clock, progress=progress)
        passes.prepared(warmed.report.prepared)
        if warmed.report.num_deferred:
            passes.defer(warmed.skipped)
        passes.close(buckets, closing)
    return passes, warmed


def _table(bucketing: GuardedBucketing, limits: BucketLimits) -> tuple[Bucket, ...]:
    """Return the buckets that a strategy lists.

    Raises:
        ContractError: It lists something else, or more than can be prepared.
    """
    table: object = bucketing.strategy.buckets(limits)
    if isinstance(table, tuple | list) and len(table) <= _MAX_BUCKETS and all(isinstance(one, Bucket) for one in table):
        return tuple(table)
    raise ContractError(
        f"{bucketing.label} returned {shown(table)} from buckets(), which must be a tuple of at most {_MAX_BUCKETS} Buckets.",
        hint="Mend it, or choose another in bucketing.name.",
    )


def compose_embedding_engine(config: Config, parts: EmbeddingParts, *, clock: Clock | None = None) -> EmbeddingEngine:
    """Put the engine of an encoder together; there is no cache to size and nothing to warm up.

    Args:
        config: Tables ``engine`` and ``model`` are read.
        parts: The executor and who watches.
        clock: The system's if none is given.

    Raises:
        ConfigValueError: ``model.max_model_len`` exceeds the model's own.
    """
    return EmbeddingEngine(
        executor=parts.executor,
        observers=Observers(parts.observers, clock=clock or SystemClock(), budget_ms=config.observer.budget_ms),
        model=parts.model,
        max_model_len=longest_sequence(config, parts.model),
        max_num_batched_tokens=config.engine.max_num_batched_tokens,
        plan_hash=parts.plan_hash,
        on_close=parts.on_close,
    )


def _allocation(config: Config, limits: BucketLimits, parts: Parts, num_hosted: int, meters: Meters) -> AllocationPlan:
    worker = None
    if parts.connector is not None:
        label = parts.connector_label
        worker = GuardedWorker(
            parts.connector.worker, label=label, meter=meters("kv_connector", label, lane=ACTIVITY.device)
        )
    return AllocationPlan(
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        num_rows=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_draft_tokens=limits.max_draft_tokens,
        acceptance=parts.speculation.acceptance if parts.speculation else None,
        connector=worker,
        num_host_blocks=num_hosted,
        layer_wait_s=config.cache.layer_wait_s,
    )


def _allocate(executor: Executor, plan: AllocationPlan, parts: Parts) -> None:
    """Allocate, and tell the connector's scheduler side what its worker side was shown, and how first tokens are chosen."""
    executor.allocate(plan)
    if parts.connector is not None:
        parts.connector.scheduler.on_ready(executor.kv_layout())
        if parts.first_token_terms is not None:
            parts.connector.scheduler.on_sampling(parts.first_token_terms)


def _administration(
    config: Config, parts: Parts, state: EngineState, policy: GuardedScheduling, decisions: Decisions
) -> Administration:
    return Administration(
        state,
        policy,
        decisions,
        switch=parts.switch,
        plan_hash=parts.plan_hash,
        role=EngineRole(config.engine.role, state.transfers),
    )


def _policy(parts: Parts, state: EngineState, meters: Meters) -> GuardedScheduling:
    policy = GuardedScheduling(*parts.scheduling, meter=meters("scheduling", parts.scheduling[0]))
    policy.live = lambda: [(slot, state.table.sequence(slot).request) for slot in state.slot_of.values()]
    if parts.switch is not None:
        policy.name = parts.switch.in_force.plan.choices["scheduling"].component.name
    if parts.shadow is not None:
        meter = meters("scheduling", f"{parts.shadow[0]} (shadow)")
        policy.shadow = Shadow(*parts.shadow, clock=state.clock, meter=meter)
    return policy


def _defragmenter(
    config: Config, capabilities: BackendCapabilities, state: EngineState, executor: Executor
) -> Defragmenter | None:
    """Return what keeps blocks at low ids, or None where that saves nothing or is switched off.

    Raises:
        ConfigValueError: It is asked for beside a KV connector, which knows blocks by their ids.
    """
    wanted, connected = config.defragmenter.enabled, state.transfers.has_connector
    if wanted == "on" and connected:
        raise ConfigValueError(
            '[defragmenter] enabled = "on": the KV connector refers to blocks by their ids, so they cannot move.',
            hint='Set it to "auto", or kv_connector.name to "none".',
        )
    reads_ranges = capabilities.contiguous or capabilities.layout == "unified"
    if wanted == "off" or connected or not (reads_ranges or wanted == "on"):
        return None
    return Defragmenter(
        state,
        config.defragmenter,
        copy_blocks=lambda sources, targets: executor.copy_blocks(sources=sources, targets=targets),
        copy_sizes=capabilities.copy_sizes,
    )


def _state(
    config: Config, parts: Parts, clock: Clock, swapping: Swapping, limits: BucketLimits, meters: Meters
) -> EngineState:
    connector = None
    if parts.connector is not None:
        label = parts.connector_label
        connector = GuardedConnector(parts.connector.scheduler, label=label, meter=meters("kv_connector", label))
    eviction = GuardedEviction(*parts.eviction, meter=meters("eviction", parts.eviction[0]))
    return EngineState(
        clock=clock,
        blocks=BlockManager(num_blocks=limits.num_blocks, eviction=eviction),
        hasher=BlockHasher(
            key=config.cache.key,
            compatibility=_compatibility(config, parts.model, limits.block_size),
            block_size=limits.block_size,
            shared_prefixes=parts.shared_prefixes,
        ),
        transfers=Transfers(
            connector,
            load_timeout_s=config.cache.load_timeout_s,
            lookup_timeout_s=config.cache.lookup_timeout_s,
            quarantine_s=config.cache.quarantine_s,
            max_parked=config.cache.max_parked,
            close_worker=parts.executor.close_connector,
            num_ranks=parts.executor.num_ranks,
            layerwise=parts.executor.capabilities.layerwise_kv,
            first_tokens=FirstTokens(vocab_size=parts.model.vocab_size, may_begin=parts.may_begin),
        ),
        swapping=swapping,
        num_rows=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        block_size=limits.block_size,
        eos_token_ids=parts.model.eos_token_ids,
        seed=config.engine.seed,
        prefix_caching=config.cache.prefix_caching,
        tenants=config.scheduling.tenants,
        max_loras=config.engine.max_loras,
        max_adapter_skips=config.engine.max_adapter_skips,
    )


def _limits(
    config: Config,
    capabilities: BackendCapabilities,
    block_size: int,
    max_model_len: int,
    num_blocks: int,
    max_drafts: int,
) -> BucketLimits:
    max_num_seqs = config.engine.max_num_seqs
    max_prefills = min(capabilities.max_prefill_batch_size or max_num_seqs, max_num_seqs)
    return BucketLimits(
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=config.engine.max_num_batched_tokens,
        max_prefill_batch_size=1 if capabilities.merges_prefills else max_prefills,
        num_blocks=num_blocks,
        contiguous=capabilities.contiguous,
        prefix_caching=config.cache.prefix_caching,
        max_draft_tokens=max_drafts,
        max_merged_prefills=max_prefills if capabilities.merges_prefills else 1,
        unified=capabilities.layout == "unified",
    )


def _closes(config: Config, buckets: tuple[Bucket, ...], limits: BucketLimits) -> bool:
    """Whether shapes that the table leaves out get a bucket; a unified table has its largest passes."""
    return config.bucketing.complete and config.bucketing.on_miss != "refuse" and bool(buckets) and not limits.unified


def _compatibility(config: Config, model: ModelFacts, block_size: int) -> str:
    """Return everything that changes the bytes of a KV block or their meaning; where the files lie only if they have no fingerprint."""
    where = () if model.fingerprint else (config.model.path, config.model.revision)
    return "\0".join((*where, model.identity, str(block_size)))
