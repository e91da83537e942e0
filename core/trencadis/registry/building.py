"""Makes the components of one plan: each by its factory, with what is known when its turn comes, and its fallback ready beside it.

A builder travels to the process of a rank as its configuration, and there makes the components that live with a rank.
"""

from __future__ import annotations

import functools
import math
import pickle
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import attrs

from trencadis.activity import MonitoredThread
from trencadis.clock import Clock, SystemClock
from trencadis.config.dump import dump_config
from trencadis.config.schema import Config
from trencadis.errors import ContractError, PluginError, PluginLoadError
from trencadis.faults import CallMeter, Fallback, as_words, shown
from trencadis.interfaces import Backend, BackendCapabilities, ComponentContext, ConnectorPair, Executor, Sampler
from trencadis.log import configure_logging, log_levels
from trencadis.records import BucketLimits, ModelFacts, ModelSource
from trencadis.registry.collect import RegisteredComponent
from trencadis.registry.plan import Choice, ResolvedPlan, resolve_plan
from trencadis.registry.provenance import OUR_DISTRIBUTION
from trencadis.registry.registry import Registry
from trencadis.registry.startup import load_with_plugins

__all__ = ["Builder", "Meters", "budget_of"]

T = TypeVar("T")

_FORGIVEN = {"speculation": 4}
"""Slow calls that are only warned about, by noun: the first ones of a draft model may compile."""


class Builder:
    """Calls the factories of one plan.

    Args:
        registry: The plugins.
        plan: Which component serves each noun.
        config: The configuration.
        context: Passed to every factory.
        context_of: Makes the same context in the process of a rank; can be pickled. None: the builder does not travel.

    Attributes:
        device_label: Names executor and backend in messages.
    """

    def __init__(
        self,
        registry: Registry,
        plan: ResolvedPlan,
        config: Config,
        context: ComponentContext,
        *,
        context_of: Callable[[Config, Clock], ComponentContext] | None = None,
    ) -> None:
        self.registry = registry
        self.plan = plan
        self.config = config
        self.device_label = ""
        self._context = attrs.evolve(context, make=self._make_inner, label_of=self._label_inner)
        self._context_of = context_of
        self._made: list[tuple[RegisteredComponent, Any]] | None = []

    def __reduce__(self) -> tuple[Any, ...]:
        given = list(map(str, self.registry.given_in_code))
        if given:
            several = self.config.parallel.tensor * self.config.parallel.pipeline > 1
            here = "" if several else ', or set executor.name = "inline"'
            raise PluginError(
                f"[executor] name = {self.label('executor')}: {'; '.join(given)} cannot travel to another process.",
                hint=f"Install it with an entry point, or name its component by import path{here}.",
            )
        tables = pickle.dumps((dump_config(self.config), dict(self.registry.sources), log_levels()))
        return _builder_in_rank, (tables, self._context_of, self._context.model, self._context.limits)

    # --------------------------------------------------------------------------------------------------- making

    def make(self, choice: Choice) -> Any:
        """Return what the factory of a component returns."""
        made = self.registry.build(choice.component, choice.options, self._context)
        if self._made is not None:
            self._made.append((choice.component, made))
        return made

    def guarded(self, noun: str) -> tuple[str, Any, Fallback[Any] | None]:
        """Return label, strategy, and maker of the fallback: none if the fallback is the strategy itself."""
        chosen, fallback = self.plan.choices[noun], self.plan.fallbacks.get(noun)
        label, strategy = str(chosen.component), self.make(chosen)
        if fallback is None or fallback.component == chosen.component:
            return label, strategy, None
        return (
            label,
            strategy,
            Fallback(str(fallback.component), lambda: self.make(fallback), lambda: self.make(chosen)),
        )

    def label(self, noun: str) -> str:
        """Return what names a noun's component and its distribution in messages."""
        choice = self.plan.choices.get(noun)
        return f"the {noun}" if choice is None else str(choice.component)

    def with_plan(self, plan: ResolvedPlan) -> Builder:
        """Return a builder by another plan, which knows what is known now."""
        other = Builder(self.registry, plan, self.config, self._context, context_of=self._context_of)
        other.started()
        return other

    def know_limits(self, limits: BucketLimits) -> None:
        """Tell the components that are made from now on how large the engine is."""
        self._context = attrs.evolve(self._context, limits=limits)

    def meters(self) -> Meters:
        """Return what measures the calls of the components that are made here."""
        return Meters(self.config, self._context.clock)

    def _make_inner(self, noun: str, name: str) -> Any:
        return self.make(self._inner(noun, name))

    def _label_inner(self, noun: str, name: str) -> str:
        return str(self._inner(noun, name).component)

    def _inner(self, noun: str, name: str) -> Choice:
        own = self.plan.choices.get(noun) if not name else None
        return own or self.plan.inner_choice(noun, name)

    # ---------------------------------------------------------------------------------------------------- start

    def start(self, executor: Executor, source: ModelSource, make_sampler: Callable[[int], Sampler]) -> ModelFacts:
        """Load the model; what is made from now on is told of it.

        Args:
            executor: The executor that ``device_label`` names.
            source: Where the model is.
            make_sampler: Makes the sampler of a rank; travels to its process.

        Raises:
            ContractError: The executor returns no model, or has no capabilities.
        """
        started = executor.start(make_backend=_BackendMaker(self), make_sampler=make_sampler, source=source)
        model = _checked(self.device_label, "load", started, ModelFacts)
        _checked(self.device_label, "capabilities", executor.capabilities, BackendCapabilities)
        self.plan = self.plan.resolve_bucketing(executor.capabilities.layout)
        self._context = attrs.evolve(self._context, model=model)
        return model

    def backend(self) -> Backend:
        """Make the backend of a rank."""
        backend: Backend = self.make(self.plan.choices["backend"])
        # A bucketing that does not go with the layout is an error before a model is loaded.
        self.plan.resolve_bucketing(backend.capabilities.layout)
        return backend

    def preload_backend(self) -> None:
        """Import what the backend offers to import early, in the process that ranks are forked from."""
        choice = self.plan.choices["backend"]
        self.registry.preload(choice.component, choice.options)

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


@attrs.frozen
class _BackendMaker:
    """Makes the backends of ranks; travels to their processes."""

    builder: Builder

    def __call__(self, rank: int) -> Backend:
        return self.builder.backend()

    @property
    def preload(self) -> Callable[[], None] | None:
        """Imports what the backend needs, if it may be imported early."""
        can_preload = self.builder.plan.choices["backend"].component.component.preload is not None
        return self.builder.preload_backend if can_preload else None


def _builder_in_rank(
    tables: bytes,
    context_of: Callable[[Config, Clock], ComponentContext],
    model: ModelFacts | None,
    limits: BucketLimits | None,
) -> Builder:
    """Return a builder of the same configuration in the process of a rank."""
    registry, plan, config = _resolved_in_rank(tables)
    context = attrs.evolve(context_of(config, SystemClock()), model=model, limits=limits)
    return Builder(registry, plan, config, context, context_of=context_of)


@functools.lru_cache(maxsize=1)
def _resolved_in_rank(tables: bytes) -> tuple[Registry, ResolvedPlan, Config]:
    """Load plugins and configuration as the engine's process did, once: neither a file nor the environment is read again."""
    overrides, sources, (level, _) = pickle.loads(tables)  # later a rank has little to say
    configure_logging(level, overrides.get("log", {}).get("format", "text"))
    resolved, registry = load_with_plugins(environ={}, overrides=overrides)
    registry.sources = sources
    registry.hooks.configure(resolved.config)
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


class Meters:
    """Makes what measures the calls of components: each by the budget of its noun.

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


def budget_of(config: Config, noun: str) -> float:
    """Return how long a call of a component may take, seconds; infinity if that is not limited. Pure."""
    budget_ms: float = getattr(config.budget, f"{noun}_ms", 0.0)
    return budget_ms / 1000 or math.inf
