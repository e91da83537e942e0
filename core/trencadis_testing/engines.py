"""Whole engines in one call, on a fake backend and in this thread: what suites and tests run strategies in."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import attrs

from trencadis.clock import Clock, SimulatedClock
from trencadis.interfaces import BucketingStrategy, EvictionPolicy, SchedulingPolicy, StageDefinition
from trencadis.records import Bucket, BucketLimits, FinishedSequence, ModelSource, RowStart, SamplingParams, Shape
from trencadis_testing.doubles import AsManyAsMay, Matching
from trencadis_testing.fake_executor import FakeExecutor
from trencadis_testing.fakes import FakeBackend

if TYPE_CHECKING:
    from trencadis.engine.engine import Engine
    from trencadis.engine.stage import Made
    from trencadis.interfaces import (
        AcceptanceRule,
        Backend,
        ConnectorPair,
        DraftLength,
        Executor,
        Observer,
        Sampler,
        SamplingFingerprint,
        Speculator,
    )
    from trencadis.registry.stages import RegisteredStage

__all__ = ["ExactShapes", "OldestFirst", "ServeInOrder", "drain", "make_engine"]


class ServeInOrder(SchedulingPolicy):
    """The contract's defaults: first come, first served."""


class OldestFirst(EvictionPolicy):
    """The reference eviction: blocks that became unreferenced first go first."""

    def __init__(self) -> None:
        self._candidates: OrderedDict[int, None] = OrderedDict()

    def on_free(self, blocks: Sequence[int], *, depths: Sequence[int], now_s: float) -> None:
        """Append."""
        self._candidates.update(dict.fromkeys(blocks))

    def on_hit(self, blocks: Sequence[int], *, now_s: float) -> None:
        """Drop."""
        for block in blocks:
            del self._candidates[block]

    def victims(self, num_blocks: int) -> list[int]:
        """Pop from the head."""
        return [self._candidates.popitem(last=False)[0] for _ in range(num_blocks)]

    def forget(self, blocks: Sequence[int]) -> None:
        """Drop."""
        for block in blocks:
            self._candidates.pop(block, None)


class ExactShapes(BucketingStrategy):
    """Every shape is its own bucket."""

    def buckets(self, limits: BucketLimits) -> tuple[Bucket, ...]:
        """Nothing to prepare."""
        return ()

    def bucket_for(self, shape: Shape) -> Bucket:
        """Return the shape itself."""
        return Bucket.of(shape)


def make_engine(
    *,
    policy: SchedulingPolicy | None = None,
    eviction: EvictionPolicy | None = None,
    bucketing: BucketingStrategy | None = None,
    backend: Backend | None = None,
    executor: Executor | None = None,
    clock: Clock | None = None,
    num_blocks: int = 64,
    block_size: int = 4,
    observers: Sequence[tuple[str, Observer]] = (),
    speculator: Speculator | Made | None = None,
    draft_length: DraftLength | Made | None = None,
    acceptance: AcceptanceRule | None = None,
    connector: ConnectorPair | None = None,
    sampling_fingerprint: SamplingFingerprint | None = None,
    can_start_with: Callable[[RowStart, int], bool] = lambda _, __: True,
    prepare: Callable[[SamplingParams, str], tuple[Future[Any], ...]] = lambda _, __: (),
    is_portable: Callable[[SamplingParams], bool] = lambda _: True,
    fallback: bool = False,
    on_miss: str = "fallback",
    complete: bool = False,
    prefix_caching: bool = True,
    load_timeout_s: float = 30.0,
    release_timeout_s: float = 60.0,
    layer_wait_s: float = 0.2,
    max_waiting_loads: int = 256,
    swap_blocks: int = 1024,
    defragmenter: Mapping[str, Any] | None = None,
    tenants: Mapping[str, Any] | None = None,
    shared_prefixes: Sequence[Sequence[int]] = (),
    pipeline: int = 1,
    attention_ranks: int = 1,
    stages: Iterable[StageDefinition] = (),
    contains_faults: bool = True,
    tables: Mapping[str, Any] | None = None,
    **options: Any,
) -> Engine:
    """Return an engine of the given strategies; the rest are references.

    Args:
        policy: Scheduling; first come, first served if none.
        eviction: Oldest first if none.
        bucketing: Exact shapes if none.
        backend: A strict :class:`FakeBackend` if none.
        executor: A :class:`FakeExecutor` if none; it hosts ``backend``, unless it was made with one.
        clock: A simulated clock if none.
        num_blocks: KV blocks of a rank.
        block_size: Tokens per block.
        observers: Names and observers.
        speculator: Who drafts; or it and its fallback, ``Made``.
        draft_length: How much; as much as may be if none. It may come with its fallback, too.
        acceptance: Which drafts stand; those that match if none. The fake backend does not ask it.
        connector: A KV connector.
        sampling_fingerprint: Fingerprint that is sent to other engines that are to choose first tokens.
        can_start_with: Whether a text could begin with a token that another engine chose.
        prepare: Preparation that a sampler needs before a request can run, by its parameters and tenant.
        is_portable: Whether a sequence with these parameters may go on after tokens that another engine chose.
        fallback: Give scheduling, eviction and bucketing their references as fallbacks.
        on_miss: Key ``on_miss`` of the table ``[bucketing]``.
        complete: Key ``complete`` of the same table; off, so that just the strategy's table is prepared.
        prefix_caching: Keep blocks for reuse.
        load_timeout_s: Timeout of KV loads, in seconds.
        release_timeout_s: Key ``release_timeout_s`` of the table ``[cache]``.
        layer_wait_s: Key ``layer_wait_s`` of the same table.
        max_waiting_loads: Key ``max_waiting_loads`` of the same table.
        swap_blocks: Blocks that host memory has room for; used if ``preemption`` is ``swap``.
        defragmenter: Fields of the table ``[defragmenter]``.
        tenants: Entries of ``[scheduling.tenants]``, by name.
        shared_prefixes: Token ids of prompts' beginnings whose blocks every salt shares.
        pipeline: Key ``pipeline`` of the table ``[parallel]``.
        attention_ranks: Ranks that have sequences of their own, each a part of rows and blocks; the executor hosts what stands for all.
        stages: Stages beside those of the installed plugins, or in the place of one with the same name.
        contains_faults: Guard these stages as those of other distributions are; off, what one raises is raised.
        tables: Config objects of plugins' own tables, by name.
        options: Fields of the table ``[engine]``.
    """
    from trencadis.config import schema
    from trencadis.engine.build import compose_engine
    from trencadis.engine.parts import Parts
    from trencadis.engine.stage import Made, SamplingRules

    backend = backend or FakeBackend(max_model_len=num_blocks * block_size)
    executor = executor or FakeExecutor()
    facts = executor.start(make_backend=_Given(backend), make_sampler=_no_sampler, source=ModelSource(path="fake"))
    cache = schema.CacheConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        prefix_caching=prefix_caching,
        load_timeout_s=load_timeout_s,
        release_timeout_s=release_timeout_s,
        layer_wait_s=layer_wait_s,
        max_waiting_loads=max_waiting_loads,
        swap_bytes=swap_blocks * block_size * facts.kv_bytes_per_token,
    )
    attention = "data" if attention_ranks > 1 else "tensor"
    config = schema.Config(
        engine=attrs.evolve(schema.EngineConfig(), **options),
        cache=cache,
        parallel=schema.ParallelConfig(
            pipeline=pipeline, tensor=attention_ranks, expert=attention_ranks, attention=attention
        ),
        bucketing=schema.BucketingConfig(on_miss=on_miss, complete=complete),
        scheduling=schema.SchedulingConfig(
            tenants={name: schema.TenantConfig(**entry) for name, entry in (tenants or {}).items()}
        ),
        defragmenter=schema.DefragmenterConfig(**(defragmenter or {})),
        tables=dict(tables or {}),
    )
    made = {} if connector is None else {"kv_connector": Made(label="the KV connector", component=connector)}
    if speculator is not None:
        nouns = {
            "speculation": speculator,
            "draft_length": draft_length or AsManyAsMay(),
            "acceptance": acceptance or Matching(),
        }
        for noun, one in nouns.items():
            made[noun] = one if isinstance(one, Made) else Made(label=type(one).__name__, component=one)
    evictions = iter([eviction])
    parts = Parts(
        executor=executor,
        model=facts,
        make_bucketing=lambda _: ("bucketing", bucketing or ExactShapes(), ExactShapes if fallback else None),
        scheduling=("scheduling", policy or ServeInOrder(), ServeInOrder if fallback else None),
        make_eviction=lambda: ("eviction", next(evictions, None) or OldestFirst(), OldestFirst if fallback else None),
        observers=tuple(observers),
        made=made,
        stages=_with_further(_installed_stages(), stages, contains_faults=contains_faults),
        sampling=SamplingRules(
            fingerprint=sampling_fingerprint, can_start_with=can_start_with, prepare=prepare, is_portable=is_portable
        ),
        shared_prefixes=tuple(tuple(prefix) for prefix in shared_prefixes),
    )
    return compose_engine(config, parts, clock=clock or SimulatedClock())


@functools.lru_cache(maxsize=1)
def _installed_stages() -> Sequence[RegisteredStage]:
    """Return the stages of the installed plugins."""
    from trencadis.registry import Registry

    return Registry.discover(mentions=lambda _: False).stages


def _with_further(
    installed: Sequence[RegisteredStage], further: Iterable[StageDefinition], *, contains_faults: bool
) -> Sequence[RegisteredStage]:
    """Return the installed stages and further ones, in their order."""
    from trencadis.registry.provenance import OUR_DISTRIBUTION, Provenance
    from trencadis.registry.stages import RegisteredStage, in_order

    owner = "" if contains_faults else OUR_DISTRIBUTION
    given = Provenance(plugin="given", module=__name__, distribution=owner)
    added = {one.name: RegisteredStage(definition=one, provenance=given) for one in further}
    return in_order({**{one.definition.name: one for one in installed}, **added}) if added else installed


def drain(engine: Engine, max_steps: int = 500) -> dict[str, FinishedSequence]:
    """Step until there is nothing left to do; returns what ended, by request id.

    Raises:
        AssertionError: There is still work after ``max_steps``.
    """
    finished: dict[str, FinishedSequence] = {}
    for _ in range(max_steps):
        if not engine.has_work:
            return finished
        finished.update((end.request_id, end) for end in engine.step().finished)
    raise AssertionError(f"the engine has not come to rest after {max_steps} steps")


class _Given:
    """Makes one backend; travels to another process if that does."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __call__(self, rank: int) -> Backend:
        return self._backend


def _no_sampler(rank: int) -> Sampler:
    return None  # type: ignore[return-value] # a fake backend samples by itself
