"""The composition root: config and registry in, engine out.

Live serving, replay and simulation differ only in what is handed in: clock, backend, executor.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import attrs

from trencadis.clock import Clock, SystemClock
from trencadis.config.schema import Config
from trencadis.engine.compose import EmbeddingParts, Parts, compose_embedding_engine, compose_engine
from trencadis.engine.drafting import Speculation
from trencadis.engine.embedding_engine import EmbeddingEngine
from trencadis.engine.engine import Engine
from trencadis.engine.first_token_terms import SamplingTerms
from trencadis.engine.request_check import check_honoured
from trencadis.engine.switch import SchedulingSwitch
from trencadis.errors import CapabilityError, ConfigValueError, ContractError
from trencadis.interfaces import (
    AcceptanceRule,
    Backend,
    BucketingStrategy,
    ComponentContext,
    Executor,
    Observer,
    Sampler,
    SupportsPreparation,
)
from trencadis.records import BucketLimits, ModelFacts, ModelSource, SamplingParams, parameters_in
from trencadis.registry import Choice, Registry, ResolvedPlan, resolve_plan
from trencadis.registry.switching import SchedulingInForce
from trencadis.startup import Phases, rare_collections
from trencadis.text import model_finder, read_prefixes, resolve_model_path, vocabulary_reader

__all__ = ["build_engine"]

logger = logging.getLogger("trencadis.engine")


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
    except BaseException:
        executor.close()
        raise
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
        self._context = attrs.evolve(context, make=self._make_inner)
        self._judge: Sampler | None = None
        self.device_label = ""
        self._honoured: frozenset[str] | None = None

    def make(self, choice: Choice) -> Any:
        return self._registry.build(choice.component, choice.options, self._context)

    def _make_by(self, plan: ResolvedPlan, choice: Choice) -> Any:
        """Build a component by another plan, with what is known now."""
        return _Builder(self._registry, plan, self._context).make(choice)

    def _make_inner(self, noun: str, name: str) -> Any:
        own = self._plan.choices.get(noun) if not name else None
        return self.make(own or self._plan.inner_choice(noun, name))

    def load(self, executor: Executor, source: ModelSource) -> ModelFacts:
        """Load the model; what is built from now on is told of it."""
        model = executor.start(make_backend=self._backend, make_sampler=self._sampler, source=source)
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
        return Speculation(
            speculator=drafter[1],
            length=length[1],
            labels=(drafter[0], length[0]),
            make_fallbacks=(drafter[2], length[2]),
            acceptance=self._acceptance(choices["acceptance"]),
            takes_drafts=lambda params, branching: self._judging().takes_drafts(params, branching=branching),
        )

    def _acceptance(self, choice: Choice) -> AcceptanceRule:
        rule: AcceptanceRule = self.make(choice)
        # What comes by import path declares no capabilities, so that nobody has compared them.
        if rule.needs_laws and type(self._judging()).verify is Sampler.verify:
            raise CapabilityError(
                f"[acceptance] name = {choice.component.name!r}: {type(rule).__name__} reads the laws that tokens are drawn from, and "
                f"the sampler {type(self._judging()).__name__} tells none.",
                hint='Set acceptance.name to "match", or sampling.name to "standard".',
            )
        return rule

    def _judging(self) -> Sampler:
        """Return a sampler in this process, which the backend's need not be; made when it is first needed."""
        self._judge = self._judge or self._sampler(0)
        return self._judge

    def _honoured_by(self, sampler: Sampler) -> frozenset[str] | None:
        """Return the parameters that a sampler honours; None if it is of a version that did not state them.

        Raises:
            ContractError: It states what is no parameter.
        """
        component = self._plan.choices["sampling"].component
        if component.component.interface_version < 2 and not sampler.honours:
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
        sampler: Sampler = self.make(self._plan.choices["sampling"])
        self._honoured = self._honoured_by(sampler)
        return sampler

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
            (lambda: self.make(fallback)) if fallback is not None else None,
        )

    def _bucketing(self, limits: BucketLimits) -> tuple[str, BucketingStrategy, Callable[[], BucketingStrategy] | None]:
        self._context = attrs.evolve(self._context, limits=limits)
        return self._guarded("bucketing")
