"""The composition root: config and registry in, engine out.

Live serving, replay and simulation differ only in what is handed in: clock, backend, executor.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import attrs

from trencadis.clock import Clock, SystemClock
from trencadis.config.schema import Config
from trencadis.engine.compose import EmbeddingParts, Parts, budget_of, compose_embedding_engine, compose_engine
from trencadis.engine.embedding_engine import EmbeddingEngine
from trencadis.engine.engine import Engine
from trencadis.engine.guarded_sampling import GuardedAcceptance, GuardedSampler
from trencadis.engine.guards import Fallback
from trencadis.engine.request_check import check_honoured
from trencadis.engine.scheduling.switch import SchedulingSwitch
from trencadis.engine.speculation.drafting import Speculation
from trencadis.engine.transfer.first_token_terms import SamplingTerms
from trencadis.errors import CapabilityError, ConfigValueError, ContractError, PluginLoadError, TrencadisError
from trencadis.faults import as_words, reraise_interrupt
from trencadis.interfaces import (
    AcceptanceRule,
    Backend,
    BackendCapabilities,
    BucketingStrategy,
    ComponentContext,
    ConnectorPair,
    Executor,
    Observer,
    Sampler,
    Speculator,
    SupportsPreparation,
)
from trencadis.records import BucketLimits, ModelFacts, ModelSource, SamplingParams, parameters_in
from trencadis.registry import Choice, RegisteredComponent, Registry, ResolvedPlan, resolve_plan
from trencadis.registry.collect import OUR_DISTRIBUTION
from trencadis.registry.switching import SchedulingInForce
from trencadis.startup import Phases, rare_collections
from trencadis.text import model_finder, read_prefixes, resolve_model_path, vocabulary_reader
from trencadis.wording import shown

__all__ = ["build_engine"]

logger = logging.getLogger("trencadis.engine")

T = TypeVar("T")


def build_engine(
    config: Config,
    *,
    registry: Registry,
    clock: Clock | None = None,
    progress: Callable[[int, int], None] | None = None,
    executor: Executor | None = None,
) -> Engine | EmbeddingEngine:
    """Resolve the configured components, load the model, and return an engine that is ready for requests.

    What the model is decides which: an encoder, which generates nothing, gets an :class:`EmbeddingEngine`.

    Args:
        config: The configuration.
        registry: The plugins.
        clock: The system's if none is given.
        progress: Called during warm-up with buckets done and all.
        executor: In the place of the configured one; it need not use the configured backend.

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
        engine = _build(config, registry, clock=clock, progress=progress, executor=executor, phases=phases)
    logger.info("The engine took %s.", phases.end())
    return engine


def _build(
    config: Config,
    registry: Registry,
    *,
    clock: Clock,
    progress: Callable[[int, int], None] | None,
    executor: Executor | None,
    phases: Phases,
) -> Engine | EmbeddingEngine:
    registry.configure(config)
    plan = resolve_plan(config, registry)
    registry.warn_of_broken()
    _warn_of_silent_sampler(plan)
    context = ComponentContext(
        clock=clock,
        seed=config.engine.seed,
        quarantine_s=config.cache.quarantine_s,
        budget_s=lambda noun: budget_of(config, noun),
        vocabulary=vocabulary_reader(config),
        named_model=model_finder(config),
    )
    builder = _Builder(registry, plan, context)
    if executor is None:
        executor = builder.make(plan.choices["executor"])
        builder.device_label = " with ".join(str(plan.choices[noun].component) for noun in ("executor", "backend"))
    else:
        builder.device_label = f"executor {type(executor).__name__}"
    try:
        phases.begin("backend and model")
        model = builder.load(executor, _source(config))
        engine: Engine | EmbeddingEngine
        phases.begin("strategies")
        if model.generates:
            parts = builder.parts(config, executor, model, shared_prefixes=read_prefixes(config))
            phases.begin("cache and warm-up")
            engine = compose_engine(config, parts, clock=clock, progress=progress)
        else:
            engine = compose_embedding_engine(config, builder.embedding_parts(executor, model), clock=clock)
    except BaseException as error:
        with contextlib.suppress(Exception):  # what went wrong first is reported
            executor.close()
        reraise_interrupt(error)
        blamed = None if isinstance(error, TrencadisError) else builder.blame(error)
        if blamed is None:
            raise
        raise blamed from error
    builder.started()
    registry.ready(model, engine.plan_hash)
    return engine


def _warn_of_silent_sampler(plan: ResolvedPlan) -> None:
    component = plan.choices["sampling"].component
    if component.component.interface_version < 2:
        logger.warning(
            "%s was written for version 1 of its interface and does not state which parameters of requests it honours: those that it "
            "does not know have no effect. %s",
            component,
            component.provenance.remedy,
        )


def _source(config: Config) -> ModelSource:
    model = config.model
    return ModelSource(
        path=str(resolve_model_path(model.path)),
        dtype=model.dtype,
        revision=model.revision,
        trust_remote_code=model.trust_remote_code,
        pooling=config.embedding.pooling,
        normalize_embeddings=config.embedding.normalize,
    )


class _Builder:
    """Calls the factories of one plan, each with what is known when its turn comes."""

    def __init__(self, registry: Registry, plan: ResolvedPlan, context: ComponentContext) -> None:
        self._registry = registry
        self._plan = plan
        self._context = attrs.evolve(context, make=self._make_inner, label_of=self._label_inner)
        self._judge: Sampler | None = None
        self.device_label = ""
        self._honoured: frozenset[str] | None = None
        self._made: list[tuple[RegisteredComponent, Any]] | None = []

    def make(self, choice: Choice) -> Any:
        made = self._registry.build(choice.component, choice.options, self._context)
        if self._made is not None:
            self._made.append((choice.component, made))
        return made

    def started(self) -> None:
        """Forget what was built: what is replaced later may be freed."""
        self._made = None

    def blame(self, error: BaseException) -> PluginLoadError | None:
        """Return what a component's exception at the start means to the operator; None if no component is in its traceback."""
        found = _raised_by(self._made or (), error)
        if found is None:
            return None
        component, method = found
        return PluginLoadError(f"{component} raised {as_words(error)} in {method}().", hint=component.provenance.remedy)

    def _make_by(self, plan: ResolvedPlan, choice: Choice) -> Any:
        """Build a component by another plan, with what is known now."""
        return _Builder(self._registry, plan, self._context).make(choice)

    def _make_inner(self, noun: str, name: str) -> Any:
        return self.make(self._inner(noun, name))

    def _label_inner(self, noun: str, name: str) -> str:
        return str(self._inner(noun, name).component)

    def _inner(self, noun: str, name: str) -> Choice:
        own = self._plan.choices.get(noun) if not name else None
        return own or self._plan.inner_choice(noun, name)

    def load(self, executor: Executor, source: ModelSource) -> ModelFacts:
        """Load the model; what is built from now on is told of it."""
        started = executor.start(make_backend=self._backend, make_sampler=self._sampler, source=source)
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
            observers=self._observers(),
            speculation=self._speculation(),
            connector=self.make(choices["kv_connector"]) if "kv_connector" in choices else None,
            connector_label=self._label("kv_connector"),
            shadow=None if shadow is None else (str(shadow.component), self.make(shadow)),
            switch=SchedulingSwitch(self._registry, SchedulingInForce.at_start(config, self._plan), self._make_by),
            plan_hash=self._plan.plan_hash,
            on_close=self._registry.closing,
            check_params=self._check_params,
            prepare=self._prepare,
            may_begin=lambda start, token_id: self._judging().may_begin(start, token_id),
            first_token_terms=self._first_token_terms(model),
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
            takes_drafts=lambda params, branching: self._judging().takes_drafts(params, branching=branching),
        )

    def _acceptance(self, speculator: Speculator) -> AcceptanceRule:
        label, rule, make_fallback = self._guarded("acceptance")
        rules = {"name": (self._plan.choices["acceptance"], rule)}
        if make_fallback is not None:
            rules["fallback"] = self._plan.fallbacks["acceptance"], make_fallback()
        samplers = [self._judging(), *([] if (made := self._guarded("sampling")[2]) is None else [made()])]
        for key, (choice, one) in rules.items():
            where = f"[acceptance] {key} = {choice.component.name!r}: {type(one).__name__}"
            # What comes by import path declares no capabilities, so that they were not negotiated.
            silent = [type(sampler).__name__ for sampler in samplers if type(sampler).verify is Sampler.verify]
            if one.needs_laws and silent:
                raise CapabilityError(
                    f"{where} reads the laws that tokens are drawn from, and the sampler {silent[0]} tells none.",
                    hint='Set acceptance.name to "match", or sampling.name to "standard"; and so the fallbacks, if there are any.',
                )
            if key == "fallback" and speculator.drafts_trees and not one.takes_trees:
                raise CapabilityError(
                    f"{where} takes linear drafts only, and {type(speculator).__name__} drafts trees.",
                    hint='Set acceptance.fallback to "match" or "tree".',
                )
        return GuardedAcceptance(label, rule, make_fallback)

    def _judging(self) -> Sampler:
        """Return a sampler in this process, which the backend's need not be; made when it is first needed."""
        if self._judge is None:
            made: Sampler = self.make(self._plan.choices["sampling"])
            self._judge, self._honoured = made, self._honoured_by(made)
        return self._judge

    def _honoured_by(self, sampler: Sampler) -> frozenset[str] | None:
        """Return the parameters that a sampler honours; None if it is of a version that did not state them.

        Raises:
            ContractError: It states what is no parameter.
        """
        component = self._plan.choices["sampling"].component
        if component.component.interface_version < 2:
            return None
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
        sampler = self._judging()
        if self._honoured is not None:
            check_honoured(params, self._honoured, str(self._plan.choices["sampling"].component))
        sampler.check(params)

    def _prepare(self, params: SamplingParams, tenant: str) -> tuple[Future[Any], ...]:
        """Have the sampler in this process begin what it needs for a request; made when a request needs it."""
        if params.logits_processors or params.structured is not None:
            sampler = self._judging()
            if isinstance(sampler, SupportsPreparation):
                return sampler.prepare(params, tenant=tenant)
        return ()

    def _first_token_terms(self, model: ModelFacts) -> SamplingTerms:
        """Return what tells another engine how tokens are chosen here; that its model is the same is compared with its KV blocks."""
        facts = (self._plan.hash_of("sampling"), model.vocab_size, *sorted(model.eos_token_ids))
        digest = hashlib.blake2b(repr(facts).encode(), digest_size=16).digest()
        return SamplingTerms(digest, lambda params: self._judging().goes_on(params))

    def _backend(self, rank: int) -> Backend:
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

    def _guarded(self, noun: str) -> tuple[str, Any, Callable[[], Any] | None]:
        """Return label, strategy, and maker of the fallback: none if the fallback is the strategy itself."""
        chosen, fallback = self._plan.choices[noun], self._plan.fallbacks.get(noun)
        if fallback is not None and fallback.component == chosen.component:
            fallback = None
        return (
            str(chosen.component),
            self.make(chosen),
            None if fallback is None else Fallback(str(fallback.component), lambda: self.make(fallback)),
        )

    def _label(self, noun: str) -> str:
        """Return what names a noun's component and its distribution in messages."""
        choice = self._plan.choices.get(noun)
        return f"the {noun}" if choice is None else str(choice.component)

    def _bucketing(self, limits: BucketLimits) -> tuple[str, BucketingStrategy, Callable[[], BucketingStrategy] | None]:
        self._context = attrs.evolve(self._context, limits=limits)
        return self._guarded("bucketing")


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
