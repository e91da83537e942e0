"""Built-in scheduling policies: the sequences that run in a step, and their numbers of tokens."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Component, ComponentContext
from trencadis.interfaces.scheduling import INTERFACE_VERSION
from trencadis_plugins.scheduling.config import (
    DeadlineConfig,
    FairShareConfig,
    FcfsConfig,
    PrefillFirstConfig,
    PrefixAffinityConfig,
    PriorityConfig,
    ShortestFirstConfig,
)

__all__ = ["trencadis_scheduling_policies"]

_STABLE = frozenset({"fcfs", "priority", "shortest_first", "prefix_affinity"})

_POLICIES: tuple[tuple[str, str, type[Any], str], ...] = (
    ("fcfs", "Fcfs", FcfsConfig, "First come, first served: decodes first, prompts in chunks, the youngest preempted."),
    ("prefill_first", "PrefillFirst", PrefillFirstConfig, "Prompts and decodes in steps of their own, prompts first."),
    ("priority", "Priority", PriorityConfig, "By priority number, smallest first; waiting makes up for it."),
    ("shortest_first", "ShortestFirst", ShortestFirstConfig, "The least expected work first; waiting makes up for it."),
    ("deadline", "Deadline", DeadlineConfig, "Least slack to TTFT and TPOT targets first; late ones last."),
    ("prefix_affinity", "PrefixAffinity", PrefixAffinityConfig, "The longest cached prefix first."),
)


@hookimpl
def trencadis_scheduling_policies() -> Iterable[Component]:
    """Yield the policies; ``fair_share`` goes around another one."""
    for name, class_name, config, summary in _POLICIES:
        yield Component(
            name=name,
            factory=_factory(name, class_name),
            config=config,
            summary=summary,
            interface_version=INTERFACE_VERSION,
            stability="stable" if name in _STABLE else "provisional",
        )
    yield Component(
        name="fair_share",
        factory=_make_fair_share,
        config=FairShareConfig,
        summary="Tenants take turns by the tokens they used, by weight; an inner policy orders each one's own.",
        interface_version=INTERFACE_VERSION,
        stability="stable",
    )


def _factory(module: str, class_name: str) -> Callable[[Any, ComponentContext], Any]:
    """Return a factory that imports its policy when it is called."""

    def make(config: Any, context: ComponentContext) -> Any:
        return getattr(importlib.import_module(f"{__name__}.{module}"), class_name)(config)

    return make


def _make_fair_share(config: FairShareConfig, context: ComponentContext) -> Any:
    from trencadis_plugins.scheduling.fair_share import FairShare

    return FairShare(config, context.make("scheduling", config.inner))
