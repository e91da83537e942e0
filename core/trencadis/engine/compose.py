"""An engine from its parts: sizes the KV cache, allocates, warms up, and wires everything together."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import attrs

from trencadis.clock import Clock, SystemClock
from trencadis.config.schema import Config
from trencadis.engine.batch_builder import BatchBuilder
from trencadis.engine.block_manager import BlockManager
from trencadis.engine.closing_buckets import closing_buckets
from trencadis.engine.defragmenter import Defragmenter
from trencadis.engine.drafting import Drafting
from trencadis.engine.embedding import EmbeddingQueue
from trencadis.engine.embedding_engine import EmbeddingEngine
from trencadis.engine.engine import Engine
from trencadis.engine.guards import GuardedBucketing, GuardedEviction, GuardedScheduling
from trencadis.engine.hashing import BlockHasher
from trencadis.engine.observers import Observers
from trencadis.engine.passes import PassPlanner
from trencadis.engine.scheduler import Scheduler
from trencadis.engine.state import EngineState
from trencadis.engine.transfers import Transfers
from trencadis.engine.warmup import WarmUp, warm_up
from trencadis.errors import ConfigValueError, OutOfMemoryError
from trencadis.interfaces import (
    AllocationPlan,
    BackendCapabilities,
    BucketingStrategy,
    ConnectorPair,
    EvictionPolicy,
    Executor,
    Observer,
    SchedulingPolicy,
    Speculator,
)
from trencadis.records import Bucket, BucketLimits, MemoryReport, ModelFacts

__all__ = ["EmbeddingParts", "Parts", "compose_embedding_engine", "compose_engine", "size_cache"]

logger = logging.getLogger("trencadis.engine")


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
        speculator: Who drafts, or None.
        connector: The KV connector, or None.
    """

    make_bucketing: Callable[[BucketLimits], tuple[str, BucketingStrategy, Callable[[], BucketingStrategy] | None]]
    scheduling: tuple[str, SchedulingPolicy, Callable[[], SchedulingPolicy] | None]
    eviction: tuple[str, EvictionPolicy, Callable[[], EvictionPolicy] | None]
    speculator: Speculator | None = None
    connector: ConnectorPair | None = None


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
    config = _without_sharing(config, capabilities)
    block_size = config.cache.block_size or capabilities.default_block_size
    max_drafts = parts.speculator.max_draft_tokens if parts.speculator else 0
    max_model_len, num_blocks = size_cache(config, parts.model, executor, block_size=block_size)
    limits = _limits(config, capabilities, block_size, max_model_len, num_blocks, max_drafts)
    executor.allocate(_allocation(limits, parts))
    bucketing = GuardedBucketing(*parts.make_bucketing(limits))
    state = _state(config, parts, clock, num_blocks=num_blocks, max_model_len=max_model_len, block_size=block_size)
    passes = PassPlanner(
        bucketing,
        capabilities=capabilities,
        table=state.table,
        block_size=block_size,
        max_num_batched_tokens=config.engine.max_num_batched_tokens,
        refuse_unprepared=config.bucketing.on_miss == "refuse",
    )
    warmed = WarmUp()
    if capabilities.layout != "ragged":
        buckets = bucketing.strategy.buckets(limits) if config.engine.warmup else ()
        _check_misses(config, bucketing, buckets)
        closing = closing_buckets(bucketing.bucket_for, buckets, limits) if _closes(config, buckets, limits) else ()
        warmed = warm_up(executor, (*buckets, *closing), clock=clock, progress=progress)
        passes.prepared(warmed.report.prepared)
        passes.close(buckets, closing)
    policy = GuardedScheduling(*parts.scheduling)
    scheduler = Scheduler(
        state,
        policy,
        max_num_batched_tokens=config.engine.max_num_batched_tokens,
        max_preemptions=config.engine.max_preemptions,
        max_wait_s=config.engine.max_wait_s,
    )
    return Engine(
        state=state,
        policy=policy,
        scheduler=scheduler,
        builder=BatchBuilder(state, passes),
        executor=executor,
        observers=Observers(parts.observers, clock=clock, budget_ms=config.observer.budget_ms),
        drafting=Drafting(state, parts.speculator, max_draft_tokens=max_drafts),
        defragmenter=_defragmenter(config, capabilities, state, executor),
        embeddings=EmbeddingQueue(
            executor,
            parts.model,
            max_model_len=max_model_len,
            max_num_batched_tokens=config.engine.max_num_batched_tokens,
        ),
        model=parts.model,
        # Drafts are made from committed tokens only, so a step with drafts cannot be planned ahead.
        depth=2 if config.engine.async_scheduling and parts.speculator is None else 1,
        plan_hash=parts.plan_hash,
        warm_up=warmed,
        on_close=parts.on_close,
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
        max_model_len=_max_model_len(config, parts.model),
        max_num_batched_tokens=config.engine.max_num_batched_tokens,
        plan_hash=parts.plan_hash,
        on_close=parts.on_close,
    )


def _without_sharing(config: Config, capabilities: BackendCapabilities) -> Config:
    """Return the config with prefix caching off if two sequences cannot have a block in common."""
    if capabilities.shares_blocks or not config.cache.prefix_caching:
        return config
    logger.info("Using Contiguous PA, disabling prefix caching")
    return attrs.evolve(config, cache=attrs.evolve(config.cache, prefix_caching=False))


def _allocation(limits: BucketLimits, parts: Parts) -> AllocationPlan:
    return AllocationPlan(
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        num_rows=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_draft_tokens=limits.max_draft_tokens,
        connector=parts.connector.worker if parts.connector else None,
    )


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
    )


def _state(
    config: Config, parts: Parts, clock: Clock, *, num_blocks: int, max_model_len: int, block_size: int
) -> EngineState:
    connector = parts.connector.scheduler if parts.connector else None
    return EngineState(
        clock=clock,
        blocks=BlockManager(num_blocks=num_blocks, eviction=GuardedEviction(*parts.eviction)),
        hasher=BlockHasher(
            key=config.cache.key, compatibility=_compatibility(config, parts.model, block_size), block_size=block_size
        ),
        transfers=Transfers(connector, load_timeout_s=config.cache.load_timeout_s),
        num_rows=config.engine.max_num_seqs,
        max_model_len=max_model_len,
        block_size=block_size,
        eos_token_ids=parts.model.eos_token_ids,
        seed=config.engine.seed,
        prefix_caching=config.cache.prefix_caching,
    )


def size_cache(config: Config, model: ModelFacts, executor: Executor, *, block_size: int) -> tuple[int, int]:
    """Return the longest sequence in tokens and the number of KV blocks.

    Raises:
        ConfigValueError: ``model.max_model_len`` exceeds the model's own, or asked-for blocks cannot hold it.
        OutOfMemoryError: There is no room for one sequence of a useful length.
    """
    asked, max_model_len = config.model.max_model_len, _max_model_len(config, model)
    num_blocks = config.cache.num_blocks
    if not num_blocks:
        engine = config.engine
        report = executor.memory(max_num_batched_tokens=engine.max_num_batched_tokens, max_num_seqs=engine.max_num_seqs)
        num_blocks = _affordable_blocks(config, model, report, max_model_len, block_size)
    capacity = num_blocks * block_size
    if capacity < max_model_len:
        if asked:
            raise ConfigValueError(
                f"[model] max_model_len = {asked}: the KV cache of {num_blocks} blocks holds {capacity} tokens.",
                hint="Lower it, or raise cache.num_blocks or cache.memory_fraction.",
            )
        logger.warning("The KV cache holds %d tokens: max_model_len is cut from %d.", capacity, max_model_len)
        max_model_len = capacity
    return max_model_len, num_blocks


def _max_model_len(config: Config, model: ModelFacts) -> int:
    asked = config.model.max_model_len
    if asked > model.max_model_len:
        raise ConfigValueError(
            f"[model] max_model_len = {asked}: {model.architecture} was made for {model.max_model_len} tokens.",
            hint="Lower it, or leave it at 0 for the model's own.",
        )
    return asked or model.max_model_len


def _affordable_blocks(
    config: Config, model: ModelFacts, report: MemoryReport, max_model_len: int, block_size: int
) -> int:
    cache = config.cache
    usable = report.cache_bytes
    if usable is None:
        usable = int((report.free_bytes - report.activation_bytes) * cache.memory_fraction)
    if cache.max_bytes:
        usable = min(usable, cache.max_bytes)
    num_blocks = usable // max(1, model.kv_bytes_per_token * block_size)
    # More than every sequence at full length can never be used.
    num_blocks = min(num_blocks, config.engine.max_num_seqs * -(-max_model_len // block_size))
    if num_blocks < 2:
        raise OutOfMemoryError(
            f"{usable / 2**20:.0f} MiB for the KV cache pay for {num_blocks} blocks of "
            f"{model.kv_bytes_per_token * block_size / 2**20:.2f} MiB.",
            hint="Raise cache.memory_fraction, or free memory on the device.",
        )
    return int(num_blocks)


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


def _check_misses(config: Config, bucketing: GuardedBucketing, buckets: tuple[Bucket, ...]) -> None:
    if config.bucketing.on_miss == "refuse" and not buckets:
        why = f"{bucketing.label} lists no bucket" if config.engine.warmup else "engine.warmup is off"
        raise ConfigValueError(
            f'[bucketing] on_miss = "refuse", but {why}: every request would be refused.',
            hint="Set it to fallback, turn engine.warmup on, or choose a bucketing strategy with a table.",
        )


def _closes(config: Config, buckets: tuple[Bucket, ...], limits: BucketLimits) -> bool:
    """Whether shapes that the table leaves out get a bucket; a unified table has its largest passes."""
    return config.bucketing.complete and config.bucketing.on_miss != "refuse" and bool(buckets) and not limits.unified


def _compatibility(config: Config, model: ModelFacts, block_size: int) -> str:
    """Return everything that changes the bytes of a KV block or their meaning."""
    parts: tuple[Any, ...] = (config.model.path, config.model.revision, model.architecture, model.dtype, block_size)
    return "\0".join(map(str, parts))
