"""Built-in routers: which replica takes a request."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Component, ComponentContext, NoConfig
from trencadis.interfaces.router import INTERFACE_VERSION
from trencadis_remote.router.config import CacheAwareConfig, PrefixAffinityConfig

if TYPE_CHECKING:
    from trencadis.interfaces import Router

__all__ = ["trencadis_routers"]


@hookimpl
def trencadis_routers() -> Iterable[Component]:
    """Yield ``round_robin``, ``least_loaded``, ``power_of_two``, ``prefix_affinity`` and ``cache_aware``."""
    yield _component("round_robin", "One replica after the other.")
    yield _component("least_loaded", "The replica with the fewest requests; full KV caches count more.")
    yield _component("power_of_two", "The less loaded of two replicas drawn at random.")
    yield _component(
        "prefix_affinity",
        "The replica that has most of the prompt, unless it is loaded for that.",
        PrefixAffinityConfig,
    )
    yield _component("cache_aware", "SGLang's rule, with a radix tree of the prompts sent.", CacheAwareConfig)


def _component(name: str, summary: str, config: type[Any] = NoConfig) -> Component:
    return Component(
        name=name, factory=_maker(name, config), config=config, summary=summary, interface_version=INTERFACE_VERSION
    )


def _maker(name: str, config_class: type[Any]) -> Callable[[Any, ComponentContext], Router]:
    """Return a factory that imports the router's module when it is called; the class is named as the file."""

    def make(config: Any, context: ComponentContext) -> Router:
        module = importlib.import_module(f"trencadis_remote.router.{name}")
        made: type[Any] = getattr(module, name.title().replace("_", ""))
        if name == "power_of_two":
            router: Router = made(seed=context.seed)
        else:
            router = made() if config_class is NoConfig else made(config)
        return router

    return make
