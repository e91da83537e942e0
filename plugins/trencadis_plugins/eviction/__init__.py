"""Built-in eviction policies: the order in which unreferenced cached blocks are evicted."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Component, ComponentContext, NoConfig
from trencadis.interfaces.eviction import INTERFACE_VERSION
from trencadis_plugins.eviction.config import CostAwareConfig, LfuConfig, TtlConfig

if TYPE_CHECKING:
    from trencadis.interfaces import EvictionPolicy

__all__ = ["trencadis_eviction_policies"]

_STABLE = frozenset({"lru", "lfu"})


@hookimpl
def trencadis_eviction_policies() -> Iterable[Component]:
    """Yield ``lru``, ``lfu``, ``cost_aware`` and ``ttl``."""
    yield _component("lru", "The block unused for longest goes first; of one sequence, the last block.")
    yield _component("lfu", "The block whose uses weigh least goes first; uses age, and are remembered.", LfuConfig)
    yield _component(
        "cost_aware", "The block that saves least compute goes first; what it saves ages.", CostAwareConfig
    )
    yield _component("ttl", "As lru, but the prefixes of named cache salts stay for a time.", TtlConfig)


def _component(name: str, summary: str, config: type[Any] = NoConfig) -> Component:
    return Component(
        name=name,
        factory=_maker(name, config),
        config=config,
        summary=summary,
        interface_version=INTERFACE_VERSION,
        stability="stable" if name in _STABLE else "provisional",
    )


def _maker(name: str, config_class: type[Any]) -> Callable[[Any, ComponentContext], EvictionPolicy]:
    """Return a factory that imports the policy's module when it is called; the class is named as the file."""

    def make(config: Any, context: ComponentContext) -> EvictionPolicy:
        module = importlib.import_module(f"trencadis_plugins.eviction.{name}")
        made: type[Any] = getattr(module, name.title().replace("_", ""))
        policy: EvictionPolicy = made() if config_class is NoConfig else made(config)
        return policy

    return make
