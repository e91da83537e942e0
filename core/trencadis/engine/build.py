"""The composition root: config and registry in, engine out.

Live serving, replay and simulation differ only in what is handed in: clock, backend, executor.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import math
import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from importlib import metadata
from typing import Any, TypeVar

import attrs

from trencadis.activity import ACTIVITY, MonitoredThread
from trencadis.clock import Clock, HeldClock, Phases, SystemClock
from trencadis.config.dump import dump_config
from trencadis.config.schema import Config
from trencadis.engine.batching.passes import BatchBuilder, PartitionedPassPlanner, PassPlanner
from trencadis.engine.batching.warmup import BackgroundWarmUp, WarmUp, completing_buckets, warm_up
from trencadis.engine.cache.block_manager import BlockManager
from trencadis.engine.cache.cache_size import longest_sequence, size_cache
from trencadis.engine.cache.guarded import GuardedEviction
from trencadis.engine.cache.hashing import BlockHasher
from trencadis.engine.cache.partitions import PartitionedBlocks
from trencadis.engine.embedding import EmbeddingEngine, EmbeddingQueue
from trencadis.engine.engine import Engine
from trencadis.engine.guard import Fallback, Guarded
from trencadis.engine.guarded_sampling import GuardedAcceptance, GuardedSampler
from trencadis.engine.inspect.administration import Administration
from trencadis.engine.inspect.flight_files import FlightFiles
from trencadis.engine.inspect.flight_recorder import FlightFacts, FlightRecorder
from trencadis.engine.inspect.observers import Observers
from trencadis.engine.layout_support import check_layout
from trencadis.engine.request_check import check_honoured
from trencadis.engine.sampling_fingerprint import EngineFingerprint
from trencadis.engine.scheduling.guarded import GuardedScheduling
from trencadis.engine.scheduling.partitioned import PartitionedScheduler
from trencadis.engine.scheduling.pipelined import PipelinedScheduling
from trencadis.engine.scheduling.scheduler import Scheduler
from trencadis.engine.scheduling.shadow import Shadow
from trencadis.engine.scheduling.switch import SchedulingSwitch
from trencadis.engine.speculation.drafting import Drafting, Speculation, check_numbers
from trencadis.engine.stage import Made, Makings, Stage
from trencadis.engine.state import EngineState
from trencadis.errors import (
    CapabilityError,
    ConfigValueError,
    ContractError,
    PluginError,
    PluginLoadError,
    TrencadisError,
)
from trencadis.faults import CallMeter, as_words, reraise_interrupt, shown
from trencadis.interfaces import (
    AcceptanceRule,
    AllocationPlan,
    Backend,
    BackendCapabilities,
    BucketingStrategy,
    ComponentContext,
    ConnectorPair,
    EvictionPolicy,
    Executor,
    Observer,
    Sampler,
    SamplingFingerprint,
    SchedulingPolicy,
    Speculator,
    SupportsDeferredWarmUp,
    SupportsHead,
    SupportsPreparation,
)
from trencadis.log import configure_logging, log_levels
from trencadis.records import (
    Bucket,
    BucketLimits,
    ModelFacts,
    ModelSource,
    ParallelLayout,
    RowStart,
    SamplingParams,
    parameters_in,
)
from trencadis.registry import Choice, RegisteredComponent, Registry, ResolvedPlan, load_with_plugins, resolve_plan
from trencadis.registry.provenance import OUR_DISTRIBUTION
from trencadis.registry.stages import RegisteredStage
from trencadis.registry.switching import SchedulingInForce
from trencadis.startup import LEDGER, end_start, is_own_process, rare_collections, release_freed
from trencadis.text import model_finder, read_prefixes, resolve_model_path, vocabulary_reader

__all__ = [
    "EmbeddingParts",
    "Meters",
    "Parts",
    "TREES",
    "budget_of",
    "build_engine",
    "check_drafter",
    "check_head",
    "check_misses",
    "check_trees",
    "compose_embedding_engine",
    "compose_engine",
    "with_drafter",
    "without_sharing",
]

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
) -> Engine | EmbeddingEngine:
    """Resolve the configured components, load the model, and return an engine that is ready for requests.

    What the model is decides which: an encoder, which generates nothing, gets an :class:`EmbeddingEngine`.

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
) -> Engine | EmbeddingEngine:
    registry.configure(config)
    plan = resolve_plan(config, registry)
    for choice in plan.choices.values():
        registry.prepare(choice.component, choice.options)
    registry.warn_of_broken()
    check_layout(config, plan)
    builder = _Builder(registry, plan, _context(config, clock), config)
    if executor is None:
        executor = builder.make(plan.choices["executor"])
        builder.device_label = " with ".join(str(plan.choices[noun].component) for noun in ("executor", "backend"))
    else:
        builder.device_label = f"executor {type(executor).__name__}"
    try:
        phases.begin("backend and model")
        LEDGER.begin("imports")
        ACTIVITY.begin_part("imports")  # the longest of what comes before the backend names its own
        model = builder.load(executor, _source(config))
        engine: Engine | EmbeddingEngine
        phases.begin("strategies")
        if model.generates:
            parts = builder.parts(config, executor, model, shared_prefixes=read_prefixes(config))
            phases.begin("cache and warm-up")
            engine = compose_engine(config, parts, clock=clock, progress=progress, kind=kind)
        else:
            engine = compose_embedding_engine(config, builder.embedding_parts(executor, model), clock=clock)
    except BaseException as error:
        with contextlib.suppress(Exception):  # what went wrong first is reported
            executor.close()
        reraise_interrupt(error)
        attributed = None if isinstance(error, TrencadisError) else builder.attribute(error)
        if attributed is None:
            raise
        raise attributed from error
    builder.started()
    registry.ready(model, engine.plan_hash)
    return engine


def _context(config: Config, clock: Clock) -> ComponentContext:
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


class _Builder:
    """Calls the factories of one plan, each with what is known when its turn comes.

    It travels to the process of a rank as its configuration, and there makes the components that live with a rank.
    """

    def __init__(self, registry: Registry, plan: ResolvedPlan, context: ComponentContext, config: Config) -> None:
        self._registry = registry
        self._plan = plan
        self._config = config
        self._context = attrs.evolve(context, make=self._make_inner, label_of=self._label_inner)
        self._reference: Sampler | None = None
        self.device_label = ""
        self._honoured: frozenset[str] = frozenset()
        self._made: list[tuple[RegisteredComponent, Any]] | None = []

    def __reduce__(self) -> tuple[Any, ...]:
        given = list(map(str, self._registry.given_in_code))
        if given:
            several = self._config.parallel.tensor * self._config.parallel.pipeline > 1
            here = "" if several else ', or set executor.name = "inline"'
            raise PluginError(
                f"[executor] name = {self._label('executor')}: {'; '.join(given)} cannot travel to another process.",
                hint=f"Install it with an entry point, or name its component by import path{here}.",
            )
        tables = pickle.dumps((dump_config(self._config), dict(self._registry.sources), log_levels()))
        return _builder_in_rank, (tables, self._context.model, self._context.limits)

    def make(self, choice: Choice) -> Any:
        made = self._registry.build(choice.component, choice.options, self._context)
        if self._made is not None:
            self._made.append((choice.component, made))
        return made

    def started(self) -> None:
        """Forget what was built: what is replaced later may be freed."""
        self._made = None

    def attribute(self, error: BaseException) -> PluginLoadError | None:
        """Return what a component's exception at the start means to the operator; None if no component is in its traceback."""
        found = _raised_by(self._made or (), error)
        if found is None:
            return None
        component, method = found
        return PluginLoadError(f"{component} raised {as_words(error)} in {method}().", hint=component.provenance.remedy)

    def _make_by(self, plan: ResolvedPlan, choice: Choice) -> Any:
        """Build a component by another plan, with what is known now."""
        return _Builder(self._registry, plan, self._context, self._config).make(choice)

    def _make_inner(self, noun: str, name: str) -> Any:
        return self.make(self._inner(noun, name))

    def _label_inner(self, noun: str, name: str) -> str:
        return str(self._inner(noun, name).component)

    def _inner(self, noun: str, name: str) -> Choice:
        own = self._plan.choices.get(noun) if not name else None
        return own or self._plan.inner_choice(noun, name)

    def load(self, executor: Executor, source: ModelSource) -> ModelFacts:
        """Load the model; what is built from now on is told of it."""
        started = executor.start(make_backend=_BackendMaker(self), make_sampler=self._sampler, source=source)
        model = _checked(self.device_label, "load", started, ModelFacts)
        _checked(self.device_label, "capabilities", executor.capabilities, BackendCapabilities)
        self._plan = self._plan.resolve_bucketing(executor.capabilities.layout)
        self._context = attrs.evolve(self._context, model=model)
        return model

    def embedding_parts(self, executor: Executor, model: ModelFacts) -> EmbeddingParts:
        """Build what an encoder needs.

        Raises:
            ConfigValueError: A component is configured that an encoder has no use for.
        """
        for noun in ("speculation", "kv_connector"):
            if noun in self._plan.choices:
                raise ConfigValueError(
                    f"[{noun}] name = {self._plan.choices[noun].component}: {model.architecture} is an encoder, which "
                    "generates nothing.",
                    hint=f"Leave [{noun}] name empty, or name a model that generates in model.path.",
                )
        return EmbeddingParts(
            executor=executor,
            model=model,
            observers=self._observers(),
            kept_observers=self._built_in_observers(),
            plan_hash=self._plan.plan_hash,
            on_close=self._registry.closing,
        )

    def parts(
        self,
        config: Config,
        executor: Executor,
        model: ModelFacts,
        *,
        shared_prefixes: tuple[tuple[int, ...], ...] = (),
    ) -> Parts:
        """Build every strategy that does not need the cache's size."""
        choices, shadow = self._plan.choices, self._plan.shadow
        return Parts(
            shared_prefixes=shared_prefixes,
            executor=executor,
            model=model,
            make_bucketing=self._bucketing,
            scheduling=self._guarded("scheduling"),
            eviction=self._guarded("eviction"),
            make_eviction=lambda: self._guarded("eviction"),
            observers=self._observers(),
            kept_observers=self._built_in_observers(),
            speculation=self._speculation(),
            made={noun: self._made_of(noun) for noun in ("kv_connector",) if noun in choices},
            stages=self._stages(),
            shadow=None if shadow is None else (str(shadow.component), self.make(shadow)),
            switch=SchedulingSwitch(self._registry, SchedulingInForce.at_start(config, self._plan), self._make_by),
            plan_hash=self._plan.plan_hash,
            on_close=self._registry.closing,
            check_params=self._check_params,
            prepare=self._prepare,
            can_start_with=lambda start, token_id: self._reference_sampler().can_start_with(start, token_id),
            is_portable=lambda params: self._reference_sampler().is_portable(params),
            sampling_fingerprint=self._sampling_fingerprint(model),
            components=self._plan.code_of(),
            device_label=self.device_label,
        )

    def _speculation(self) -> Speculation | None:
        choices = self._plan.choices
        if "speculation" not in choices:
            return None
        drafter, length = self._guarded("speculation"), self._guarded("draft_length")
        fallback = self._plan.fallbacks.get("speculation")
        return Speculation(
            speculator=drafter[1],
            length=length[1],
            labels=(drafter[0], length[0]),
            names=(choices["speculation"].component.name, fallback.component.name if fallback else ""),
            make_fallbacks=(drafter[2], length[2]),
            acceptance=self._acceptance(drafter[1]),
            supports_drafts=lambda params, branching: self._reference_sampler().supports_drafts(
                params, branching=branching
            ),
        )

    def _acceptance(self, speculator: Speculator) -> AcceptanceRule:
        label, rule, make_fallback = self._guarded("acceptance")
        rules = {"name": (self._plan.choices["acceptance"], rule)}
        if make_fallback is not None:
            rules["fallback"] = self._plan.fallbacks["acceptance"], make_fallback()
        samplers = [self._reference_sampler(), *([] if (made := self._guarded("sampling")[2]) is None else [made()])]
        for key, (choice, one) in rules.items():
            where = f"[acceptance] {key} = {choice.component.name!r}: {type(one).__name__}"
            # What comes by import path declares no capabilities, so that they were not negotiated.
            silent = [type(sampler).__name__ for sampler in samplers if type(sampler).verify is Sampler.verify]
            if one.needs_distributions and silent:
                raise CapabilityError(
                    f"{where} needs the distributions that tokens are drawn from, and the sampler {silent[0]} does not provide them.",
                    hint='Set acceptance.name to "match", or sampling.name to "standard"; and so the fallbacks, if there are any.',
                )
            if key == "fallback" and speculator.drafts_trees and not one.supports_trees:
                raise CapabilityError(
                    f"{where} takes linear drafts only, and {type(speculator).__name__} drafts trees.",
                    hint='Set acceptance.fallback to "match" or "tree".',
                )
        return GuardedAcceptance(label, rule, make_fallback, remake=self._acceptance_in_rank)

    def _acceptance_in_rank(self) -> AcceptanceRule:
        """Return the acceptance rule again, in a process of a rank, where a builder of the same configuration is called."""
        return GuardedAcceptance(*self._guarded("acceptance"))

    def _stages(self) -> tuple[RegisteredStage, ...]:
        """Return the stages of all plugins, in order.

        Raises:
            PluginError: A built-in one is not among them that the configuration asks for: it would be left out silently.
        """
        stages = self._registry.stages
        needed = {"swap": self._config.engine.preemption == "swap", "transfer": "kv_connector" in self._plan.choices}
        is_blocked = any(name.rpartition(":")[2] == "stages" for name in self._config.plugins.blocked)
        missing = {name for name, is_needed in needed.items() if is_needed} - {one.definition.name for one in stages}
        if is_blocked or missing:
            raise PluginError(
                f"the built-in stages are missing{': ' if missing else ''}{', '.join(sorted(missing))}: an engine would leave out what the "
                "configuration asks for.",
                hint='Take the plugin "stages" out of [plugins] blocked, or install trencadis again.',
            )
        return stages

    def _made_of(self, noun: str) -> Made:
        """Build the component that serves a noun."""
        return Made(
            label=self._label(noun),
            component=self.make(self._plan.choices[noun]),
            remake=functools.partial(self._made_in_rank, noun),
        )

    def _made_in_rank(self, noun: str) -> tuple[Made, Meters]:
        """Build it again in the process of a rank, where a builder of the same configuration is called."""
        return self._made_of(noun), Meters(self._config, self._context.clock)

    def _reference_sampler(self) -> Sampler:
        """Return a sampler in this process, which the backend's need not be; made when it is first needed."""
        if self._reference is None:
            made: Sampler = self.make(self._plan.choices["sampling"])
            self._reference, self._honoured = made, self._honoured_by(made)
        return self._reference

    def _honoured_by(self, sampler: Sampler) -> frozenset[str]:
        """Return the parameters that a sampler honours.

        Raises:
            ContractError: It states what is no parameter, or nothing at all.
        """
        component = self._plan.choices["sampling"].component
        if sampler.honours is Sampler.honours:
            raise ContractError(
                f"{component} does not state which parameters of requests it honours: every request that sets one, such as "
                "temperature, would be refused.",
                hint=f"Set `honours` in {type(sampler).__qualname__}, to frozenset() for none.",
            )
        try:
            return parameters_in(sampler.honours)
        except ValueError as error:
            raise ContractError(
                f"{component} states in `honours`: {error}.", hint=component.provenance.remedy
            ) from error

    def _check_params(self, params: SamplingParams) -> None:
        """Refuse what the sampler does not honour. A request of defaults needs no sampler in this process, and makes none."""
        if not (params.asked or params.logits_processors or params.structured is not None):
            return
        sampler = self._reference_sampler()
        check_honoured(params, self._honoured, str(self._plan.choices["sampling"].component))
        sampler.check(params)

    def _prepare(self, params: SamplingParams, tenant: str) -> tuple[Future[Any], ...]:
        """Have the sampler in this process begin what it needs for a request; made when a request needs it."""
        if params.logits_processors or params.structured is not None:
            sampler = self._reference_sampler()
            if isinstance(sampler, SupportsPreparation):
                return sampler.prepare(params, tenant=tenant)
        return ()

    def _sampling_fingerprint(self, model: ModelFacts) -> EngineFingerprint:
        """Return what tells another engine how tokens are chosen here; that its model is the same is compared with its KV blocks."""
        facts = (self._plan.hash_of("sampling"), model.vocab_size, *sorted(model.eos_token_ids))
        digest = hashlib.blake2b(repr(facts).encode(), digest_size=16).digest()
        return EngineFingerprint(digest, lambda params: self._reference_sampler().is_portable(params))

    def backend_preload(self) -> Callable[[Any], None] | None:
        """Return what the backend offers to import before it is made."""
        return self._plan.choices["backend"].component.component.preload

    def preload_backend(self) -> None:
        """Call it, in the process that ranks are forked from."""
        choice = self._plan.choices["backend"]
        self._registry.preload(choice.component, choice.options)

    def backend(self) -> Backend:
        """Make the backend of a rank."""
        backend: Backend = self.make(self._plan.choices["backend"])
        # A bucketing that does not go with the layout is an error before a model is loaded.
        self._plan.resolve_bucketing(backend.capabilities.layout)
        return backend

    def _sampler(self, rank: int) -> Sampler:
        label, sampler, make_fallback = self._guarded("sampling")
        self._honoured = self._honoured_by(sampler)
        return GuardedSampler(label, sampler, make_fallback)

    def _observers(self) -> tuple[tuple[str, Observer], ...]:
        return tuple((str(choice.component), self.make(choice)) for choice in self._plan.observers)

    def _built_in_observers(self) -> frozenset[str]:
        observers = (choice.component for choice in self._plan.observers)
        return frozenset(str(one) for one in observers if one.provenance.distribution == OUR_DISTRIBUTION)

    def _guarded(self, noun: str) -> tuple[str, Any, Callable[[], Any] | None]:
        """Return label, strategy, and maker of the fallback: none if the fallback is the strategy itself."""
        chosen, fallback = self._plan.choices[noun], self._plan.fallbacks.get(noun)
        if fallback is not None and fallback.component == chosen.component:
            fallback = None
        return (
            str(chosen.component),
            self.make(chosen),
            None
            if fallback is None
            else Fallback(str(fallback.component), lambda: self.make(fallback), lambda: self.make(chosen)),
        )

    def _label(self, noun: str) -> str:
        """Return what names a noun's component and its distribution in messages."""
        choice = self._plan.choices.get(noun)
        return f"the {noun}" if choice is None else str(choice.component)

    def _bucketing(self, limits: BucketLimits) -> tuple[str, BucketingStrategy, Callable[[], BucketingStrategy] | None]:
        self._context = attrs.evolve(self._context, limits=limits)
        return self._guarded("bucketing")


@attrs.frozen
class _BackendMaker:
    """Makes the backends of ranks; travels to their processes."""

    builder: _Builder

    def __call__(self, rank: int) -> Backend:
        return self.builder.backend()

    @property
    def preload(self) -> Callable[[], None] | None:
        """Imports what the backend needs, if it may be imported early."""
        return None if self.builder.backend_preload() is None else self.builder.preload_backend


def _builder_in_rank(tables: bytes, model: ModelFacts | None, limits: BucketLimits | None) -> _Builder:
    """Return a builder of the same configuration in the process of a rank."""
    registry, plan, config = _resolved_in_rank(tables)
    context = attrs.evolve(_context(config, SystemClock()), model=model, limits=limits)
    return _Builder(registry, plan, context, config)


@functools.lru_cache(maxsize=1)
def _resolved_in_rank(tables: bytes) -> tuple[Registry, ResolvedPlan, Config]:
    """Load plugins and configuration as the engine's process did, once: neither a file nor the environment is read again."""
    overrides, sources, (level, _) = pickle.loads(tables)  # later a rank has little to say
    configure_logging(level, overrides.get("log", {}).get("format", "text"))
    resolved, registry = load_with_plugins(environ={}, overrides=overrides)
    registry.note_sources(sources)
    registry.configure(resolved.config)
    plan = resolve_plan(resolved.config, registry)
    for choice in plan.choices.values():
        registry.prepare(choice.component, choice.options)
    return registry, plan, resolved.config


def _checked(label: str, method: str, answer: object, kind: type[T]) -> T:
    """Return what a component answered at the start.

    Raises:
        ContractError: It is of another type.
    """
    if isinstance(answer, kind):
        return answer
    raise ContractError(
        f"{label} returned {shown(answer)} from {method}, which is no {kind.__name__}.",
        hint="Mend it, or choose another in backend.name or executor.name.",
    )


def _raised_by(
    made: Sequence[tuple[RegisteredComponent, Any]], error: BaseException
) -> tuple[RegisteredComponent, str] | None:
    """Return the component in whose code an error was raised, and which of its methods was called; None if none is.

    The innermost frame that is a component's decides: a frame whose ``self`` it is, else one of its module, else of its package.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    objects = [(component, one) for component, whole in made for one in _parts_of(whole)]

    def is_self(frame: Any, component: RegisteredComponent, one: Any) -> bool:
        return frame.f_locals.get("self") is one

    def is_module(frame: Any, component: RegisteredComponent, one: Any) -> bool:
        return frame.f_globals.get("__name__") in {type(one).__module__, component.provenance.module}

    def is_package(frame: Any, component: RegisteredComponent, one: Any) -> bool:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if component.provenance.distribution == OUR_DISTRIBUTION:
            return False  # its packages hold several components: only a module tells which one raised
        return package == component.provenance.module.partition(".")[0]

    for owns in (is_self, is_module, is_package):
        for frame in reversed(frames):
            for component, one in objects:
                if owns(frame, component, one):
                    first = next(outer for outer in frames if owns(outer, component, one))
                    return component, first.f_code.co_name
    return None


def _parts_of(made: Any) -> tuple[Any, ...]:
    return (made.scheduler, made.worker) if isinstance(made, ConnectorPair) else (made,)


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
        kept_observers: Names of those that are never switched off.
        plan_hash: Of the resolved plugins.
        on_close: Called once when the engine closes, before the executor does.
    """

    executor: Executor
    model: ModelFacts
    observers: tuple[tuple[str, Observer], ...] = ()
    kept_observers: frozenset[str] = frozenset()
    plan_hash: str = ""
    on_close: Callable[[], None] = lambda: None


@attrs.frozen(kw_only=True)
class Parts(EmbeddingParts):
    """Everything an engine is made of, built or ready to be built.

    Attributes:
        make_bucketing: Makes the strategy and, second, its fallback (or None), from the limits.
        scheduling: Label, policy, and maker of its fallback (or None).
        eviction: The same.
        make_eviction: Makes the same once more, for one more partition of the KV blocks; None: there is one partition.
        speculation: Who drafts, how much, and which drafts stand; or None.
        made: Components that stages use, by noun.
        stages: All stages that are registered, in order.
        shadow: Label and policy that is asked beside ``scheduling``, or None.
        switch: Builds other policies while the engine serves, or None.
        shared_prefixes: Token ids of prompts' beginnings whose blocks every tenant shares.
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
    eviction: tuple[str, EvictionPolicy, Callable[[], EvictionPolicy] | None]
    make_eviction: Callable[[], tuple[str, EvictionPolicy, Callable[[], EvictionPolicy] | None]] | None = None
    speculation: Speculation | None = None
    made: Mapping[str, Made] = attrs.Factory(dict)
    stages: Sequence[RegisteredStage] = ()
    shadow: tuple[str, SchedulingPolicy] | None = None
    switch: SchedulingSwitch | None = None
    shared_prefixes: tuple[tuple[int, ...], ...] = ()
    check_params: Callable[[SamplingParams], None] = lambda _: None
    prepare: Callable[[SamplingParams, str], tuple[Future[Any], ...]] = lambda _, __: ()
    can_start_with: Callable[[RowStart, int], bool] = lambda _, __: True
    is_portable: Callable[[SamplingParams], bool] = lambda _: True
    sampling_fingerprint: SamplingFingerprint | None = None
    components: Mapping[str, tuple[str, str, str, str]] = attrs.Factory(dict)
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

    def __call__(self, noun: str, label: str, *, thread: MonitoredThread | None = None) -> CallMeter:
        """Return the meter of a component; ``thread`` see :class:`~trencadis.faults.CallMeter`."""
        return CallMeter(
            label,
            clock=self._clock,
            budget_s=budget_of(self._config, noun),
            setting=f"[budget] {noun}_ms",
            thread=thread,
            num_forgiven=_FORGIVEN.get(noun, 0),
        )


def _watched(config: Config, parts: EmbeddingParts, clock: Clock) -> Observers:
    return Observers(parts.observers, clock=clock, budget_ms=config.observer.budget_ms, kept=parts.kept_observers)


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
    drafter = parts.speculation.speculator if parts.speculation else None
    check_drafter(parts.speculation)
    check_trees(parts.speculation, capabilities)
    check_head(parts.speculation, executor)
    max_drafts = drafter.max_draft_tokens if drafter else 0
    num_partitions = _layout(config).num_partitions
    max_model_len, num_blocks = size_cache(
        config, with_drafter(parts.model, drafter), executor, block_size=block_size, num_partitions=num_partitions
    )
    limits = _limits(config, capabilities, block_size, max_model_len, num_blocks, max_drafts)
    meters = Meters(config, clock)
    stages = _made_stages(config, parts, meters)
    executor.allocate(_allocation(config, limits, parts, stages))
    state = _state(config, parts, HeldClock(clock), limits, meters)
    made = parts.make_bucketing(_limits_of_rank(limits, num_partitions))
    bucketing = Guarded(BucketingStrategy, *made, meter=meters("bucketing", made[0]))
    passes, warmed = _warmed_passes(config, executor, bucketing, state, limits, clock=clock, progress=progress)
    drafting = _drafting(parts, state, passes, limits, meters)
    policy = _policy(config, parts, state, meters)
    administration = _administration(config, parts, state, policy)
    depth = _depth(config, has_drafter=drafter is not None)
    return kind(
        state=state,
        policy=policy,
        scheduler=_scheduler(config, state, policy),
        builder=BatchBuilder(state, passes, brings_tokens=config.parallel.pipeline > 1),
        executor=executor,
        observers=_watched(config, parts, clock),
        drafting=drafting,
        config=config,
        limits=limits,
        stages=stages,
        embeddings=EmbeddingQueue(
            executor,
            parts.model,
            max_model_len=max_model_len,
            max_num_batched_tokens=config.engine.max_num_batched_tokens,
        ),
        model=parts.model,
        depth=depth,
        administration=administration,
        recorder=_recorder(config, parts, state, administration, depth=depth),
        warm_up=warmed,
        background=_background(executor, passes, warmed, parts.device_label),
        on_close=parts.on_close,
        check_params=parts.check_params,
        device_label=parts.device_label,
        is_portable=parts.is_portable,
    )


def _drafting(parts: Parts, state: EngineState, passes: PassPlanner, limits: BucketLimits, meters: Meters) -> Drafting:
    """Return the part that has drafts made, with its memory allocated."""
    drafting = Drafting(
        state,
        parts.speculation,
        padded_tokens=passes.padded_tokens,
        pads=parts.executor.capabilities.layout == "padded",
        vocab_size=parts.model.vocab_size,
        head=_head(parts.executor),
        meter_of=meters,
    )
    drafting.allocate(limits)
    return drafting


def _recorder(
    config: Config, parts: Parts, state: EngineState, administration: Administration, *, depth: int
) -> FlightRecorder | None:
    """Return what records the engine's steps; None if that is switched off."""
    settings = config.flight_recorder
    if not settings.num_steps:
        return None
    tables, version = dump_config(config, secrets=False), ""
    obstacles = []
    if tables["cache"].pop("shared_prefixes"):
        obstacles.append("cache.shared_prefixes: beginnings that all salts share are texts, which no record holds")
    if "kv_connector" in parts.made:
        obstacles.append("a KV connector loads and saves blocks at moments that no record holds")
    with contextlib.suppress(metadata.PackageNotFoundError):
        version = metadata.version(OUR_DISTRIBUTION)
    facts = FlightFacts(
        version=version,
        config=tables,
        components=parts.components,
        model=attrs.asdict(parts.model),
        capabilities={
            **attrs.asdict(parts.executor.capabilities),
            "provides": sorted(parts.executor.capabilities.provides),
        },
        num_in_flight=depth,
        max_draft_tokens=parts.speculation.speculator.max_draft_tokens if parts.speculation else 0,
        obstacles=tuple(obstacles),
    )
    return FlightRecorder(
        state,
        facts,
        FlightFiles(settings),
        num_steps=settings.num_steps,
        max_bytes=settings.max_bytes,
        plan_hash=lambda: administration.plan_hash,
    )


def _made_stages(config: Config, parts: Parts, meters: Meters) -> tuple[Stage, ...]:
    """Return the stages that the configuration asks for, in the order in which they act.

    Raises:
        ContractError: One is no stage.
    """
    makings = Makings(
        config=config,
        model=parts.model,
        executor=parts.executor,
        layout=_layout(config),
        made=parts.made.get,
        meter=meters,
        sampling_fingerprint=parts.sampling_fingerprint,
        can_start_with=parts.can_start_with,
        is_portable=parts.is_portable,
        prepare=parts.prepare,
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
            made.append(stage)
    return tuple(made)


def _depth(config: Config, *, has_drafter: bool) -> int:
    """Return how many steps are in flight at once. Pure."""
    if not config.engine.async_scheduling:
        return 1
    if config.parallel.pipeline > 1:
        return config.parallel.pipeline
    # Drafts are made from committed tokens only, so a step with drafts cannot be planned ahead of one with the same sequences.
    return 1 if has_drafter else 2


def _scheduler(config: Config, state: EngineState, policy: GuardedScheduling) -> Scheduler:
    kind = Scheduler if _layout(config).num_partitions == 1 else PartitionedScheduler
    return kind(
        state,
        policy,
        max_num_batched_tokens=config.engine.max_num_batched_tokens,
        max_preemptions=config.engine.max_preemptions,
        max_wait_s=config.engine.max_wait_s,
    )


def _warmed_passes(
    config: Config,
    executor: Executor,
    bucketing: Guarded[BucketingStrategy],
    state: EngineState,
    limits: BucketLimits,
    *,
    clock: Clock,
    progress: Callable[[int, int], None] | None,
) -> tuple[PassPlanner, WarmUp]:
    """Return what gives passes their buckets, and what was prepared of these."""
    passes = _pass_planner(config, executor, bucketing, state, limits)
    limits = _limits_of_rank(limits, _layout(config).num_partitions)
    warmed = WarmUp()
    if executor.capabilities.layout != "ragged":
        buckets = _table(bucketing, limits) if config.engine.warmup else ()
        if not config.engine.warmup:
            logger.info("engine.warmup is off: each bucket is compiled when a step first needs it.")
        check_misses(config, bucketing, buckets)
        covering = completing_buckets(config.bucketing, bucketing.ask.bucket_for, buckets, limits)
        warmed = warm_up(executor, (*buckets, *covering), clock=clock, progress=progress)
        passes.prepared(warmed.report.prepared)
        passes.defer(warmed.deferred)
        passes.close(buckets, covering)
    return passes, warmed


def _pass_planner(
    config: Config, executor: Executor, bucketing: Guarded[BucketingStrategy], state: EngineState, limits: BucketLimits
) -> PassPlanner:
    num_partitions = _layout(config).num_partitions
    kind: Callable[..., PassPlanner] = PassPlanner
    if num_partitions > 1:
        kind = functools.partial(
            PartitionedPassPlanner,
            num_partitions=num_partitions,
            num_rows=limits.max_num_seqs,
            num_blocks=limits.num_blocks,
        )
    return kind(
        bucketing,
        capabilities=executor.capabilities,
        table=state.table,
        block_size=limits.block_size,
        max_num_batched_tokens=config.engine.max_num_batched_tokens,
        refuse_unprepared=config.bucketing.on_miss == "refuse",
    )


def _background(executor: Executor, passes: PassPlanner, warmed: WarmUp, label: str) -> BackgroundWarmUp | None:
    """Return what prepares the buckets that were put off; None if none were.

    Raises:
        ContractError: Some were, and nothing can prepare them.
    """
    if not warmed.report.num_deferred:
        return None
    if not isinstance(executor, SupportsDeferredWarmUp):
        raise ContractError(
            f"{label} put off {warmed.report.num_deferred} buckets in warm_up(), and has no warm_up_rest().",
            hint="Mend it, or choose another in executor.name or backend.name.",
        )
    return BackgroundWarmUp(executor, passes, warmed)


def _table(bucketing: Guarded[BucketingStrategy], limits: BucketLimits) -> tuple[Bucket, ...]:
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
        observers=_watched(config, parts, clock or SystemClock()),
        model=parts.model,
        max_model_len=longest_sequence(config, parts.model),
        max_num_batched_tokens=config.engine.max_num_batched_tokens,
        plan_hash=parts.plan_hash,
        on_close=parts.on_close,
    )


def _allocation(config: Config, limits: BucketLimits, parts: Parts, stages: Sequence[Stage]) -> AllocationPlan:
    """Return what is to be allocated, the stages' wishes included."""
    plan = AllocationPlan(
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        num_rows=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_draft_tokens=limits.max_draft_tokens,
        acceptance=parts.speculation.acceptance if parts.speculation else None,
        layer_wait_s=config.cache.layer_wait_s,
    )
    for stage in stages:
        plan = stage.allocate(plan)
    return plan


def _administration(config: Config, parts: Parts, state: EngineState, policy: GuardedScheduling) -> Administration:
    return Administration(
        state,
        policy,
        switch=parts.switch,
        plan_hash=parts.plan_hash,
    )


def _policy(config: Config, parts: Parts, state: EngineState, meters: Meters) -> GuardedScheduling:
    meter, num_stages = meters("scheduling", parts.scheduling[0]), config.parallel.pipeline
    if num_stages > 1 and config.engine.async_scheduling:
        policy: GuardedScheduling = PipelinedScheduling(
            *parts.scheduling, meter=meter, state=state, num_batches=num_stages
        )
    else:
        policy = GuardedScheduling(*parts.scheduling, meter=meter)
    policy.live = lambda: [(slot, state.table.sequence(slot).request) for slot in state.slot_of.values()]
    if parts.switch is not None:
        policy.name = parts.switch.in_force.plan.choices["scheduling"].component.name
    if parts.shadow is not None:
        meter = meters("scheduling", f"{parts.shadow[0]} (shadow)")
        policy.put_shadow(Shadow(*parts.shadow, clock=state.clock.source, meter=meter))
    return policy


def _state(config: Config, parts: Parts, clock: HeldClock, limits: BucketLimits, meters: Meters) -> EngineState:
    return EngineState(
        clock=clock,
        blocks=_blocks(parts, limits.num_blocks, _layout(config).num_partitions, meters),
        hasher=BlockHasher(
            key=config.cache.key,
            compatibility=_compatibility(config, parts.model, limits.block_size),
            block_size=limits.block_size,
            shared_prefixes=parts.shared_prefixes,
        ),
        num_rows=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        block_size=limits.block_size,
        eos_token_ids=parts.model.eos_token_ids,
        seed=config.engine.seed,
        prefix_caching=config.cache.prefix_caching,
        tenants=config.scheduling.tenants,
        num_partitions=_layout(config).num_partitions,
    )


def _blocks(parts: Parts, num_blocks: int, num_partitions: int, meters: Meters) -> BlockManager:
    def guarded(made: tuple[str, EvictionPolicy, Callable[[], EvictionPolicy] | None]) -> GuardedEviction:
        return GuardedEviction(*made, meter=meters("eviction", made[0]))

    if num_partitions == 1:
        return BlockManager(num_blocks=num_blocks, eviction=guarded(parts.eviction))
    assert parts.make_eviction is not None, "each partition has a policy of its own"
    evictions = [parts.eviction, *(parts.make_eviction() for _ in range(num_partitions - 1))]
    return PartitionedBlocks(num_blocks=num_blocks, evictions=[guarded(one) for one in evictions])


def _limits_of_rank(limits: BucketLimits, num_partitions: int) -> BucketLimits:
    """Return what bounds the part of a pass that one rank has, where sequences are spread over ranks. Pure."""
    return attrs.evolve(
        limits,
        max_num_seqs=limits.max_num_seqs // num_partitions,
        max_prefill_batch_size=min(limits.max_prefill_batch_size, limits.max_num_seqs // num_partitions),
        max_merged_prefills=min(limits.max_merged_prefills, limits.max_num_seqs // num_partitions),
        num_blocks=limits.num_blocks // num_partitions,
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


def _compatibility(config: Config, model: ModelFacts, block_size: int) -> str:
    """Return everything that changes the bytes of a KV block or their meaning; where the files lie only if they have no fingerprint."""
    where = () if model.fingerprint else (config.model.path, config.model.revision)
    return "\0".join((*where, model.identity, str(block_size)))


TREES = "backend.tree_attention"
"""Capability of a backend that verifies several drafts after one token."""


def without_sharing(config: Config, capabilities: BackendCapabilities) -> Config:
    """Return the config with prefix caching off if two sequences cannot have a block in common."""
    if capabilities.shares_blocks or not config.cache.prefix_caching:
        return config
    logger.info("Prefix caching is off: the backend shares no KV block between sequences.")
    return attrs.evolve(config, cache=attrs.evolve(config.cache, prefix_caching=False))


HEAD = "backend.head"
"""Capability of a backend that has loaded a head with the model."""


def check_drafter(speculation: Speculation | None) -> None:
    """Refuse a speculator that no room can be made for.

    Raises:
        ContractError: One of its numbers is none.
    """
    if speculation is not None:
        check_numbers(speculation.labels[0] or type(speculation.speculator).__name__, speculation.speculator)


def check_trees(speculation: Speculation | None, capabilities: BackendCapabilities) -> None:
    """Refuse tree drafts where they cannot be verified.

    Raises:
        CapabilityError: The speculator drafts trees, and the backend or the acceptance rule does not take them.
    """
    if speculation is None or not speculation.speculator.drafts_trees:
        return
    rule = speculation.acceptance
    drafter, rule_name = type(speculation.speculator).__name__, type(getattr(rule, "strategy", rule)).__name__
    if TREES not in capabilities.provides:
        raise CapabilityError(
            f'[speculation]: {drafter} drafts trees, and the backend does not provide "{TREES}".',
            hint="Let it draft linearly, or choose a backend that verifies trees.",
        )
    if not rule.supports_trees:
        raise CapabilityError(
            f"[speculation]: {drafter} drafts trees, and [acceptance] {rule_name} takes linear drafts only.",
            hint='Set acceptance.name to "match" or "tree", or let the speculator draft linearly.',
        )


def _head(executor: Executor) -> SupportsHead | None:
    """Return what has the model's head draft; None: there is none, or the executor does not reach it."""
    return executor if HEAD in executor.capabilities.provides and isinstance(executor, SupportsHead) else None


def check_head(speculation: Speculation | None, executor: Executor) -> None:
    """Refuse a speculator that drafts with the model's head where there is none.

    Raises:
        CapabilityError: No head was loaded, or the executor does not reach it.
    """
    if speculation is None or not speculation.speculator.uses_head or _head(executor) is not None:
        return
    drafter = type(speculation.speculator).__name__
    if HEAD in executor.capabilities.provides:
        raise CapabilityError(
            f"[speculation]: {drafter} drafts with the model's head, and {type(executor).__name__} does not reach it.",
            hint='Set executor.name to "inline", or choose another speculator.',
        )
    raise CapabilityError(
        f"[speculation]: {drafter} drafts with a head of the model, and none was loaded.",
        hint="Set model.head to the directory of a head that was trained for this model, to demo-head for the demo, or to mtp if its files bring one; or choose another speculator.",
    )


def with_drafter(model: ModelFacts, drafter: Speculator | None) -> ModelFacts:
    """Return the model with what the drafter keeps for each token counted in."""
    kept = 0 if drafter is None else drafter.kv_bytes_per_token
    return attrs.evolve(model, kv_bytes_per_token=model.kv_bytes_per_token + kept) if kept else model


def check_misses(config: Config, bucketing: Guarded[BucketingStrategy], buckets: tuple[Bucket, ...]) -> None:
    """Refuse an engine that would refuse every request.

    Raises:
        ConfigValueError: Passes without a prepared bucket are refused, and none is prepared.
    """
    if config.bucketing.on_miss == "refuse" and not buckets:
        why = f"{bucketing.label} lists no bucket" if config.engine.warmup else "engine.warmup is off"
        raise ConfigValueError(
            f'[bucketing] on_miss = "refuse", but {why}: every request would be refused.',
            hint="Set it to fallback, turn engine.warmup on, or choose a bucketing strategy with a table.",
        )
