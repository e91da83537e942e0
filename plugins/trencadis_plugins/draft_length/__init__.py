"""Built-in draft lengths: how many tokens are worth drafting."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Component, ComponentContext
from trencadis.interfaces.draft_length import INTERFACE_VERSION
from trencadis_plugins.draft_length.config import FixedConfig, GoodputConfig, TableConfig

if TYPE_CHECKING:
    from trencadis.interfaces import DraftLength

__all__ = ["trencadis_draft_lengths"]

_STABLE = frozenset({"fixed", "table"})


@hookimpl
def trencadis_draft_lengths() -> Iterable[Component]:
    """Yield ``fixed``, ``table`` and ``goodput``."""
    yield _component("fixed", "As many drafts as the speculator makes, or a number.", FixedConfig)
    yield _component("table", "By the number of decoding sequences.", TableConfig)
    yield _component(
        "goodput", "What gives the most tokens per second, from measured times and acceptance.", GoodputConfig
    )


def _component(name: str, summary: str, config: type[Any]) -> Component:
    return Component(
        name=name,
        factory=_maker(name),
        config=config,
        summary=summary,
        interface_version=INTERFACE_VERSION,
        stability="stable" if name in _STABLE else "provisional",
    )


def _maker(name: str) -> Callable[[Any, ComponentContext], DraftLength]:
    """Return a factory that imports the component's module when it is called; the class is named as the file."""

    def make(config: Any, context: ComponentContext) -> DraftLength:
        module = importlib.import_module(f"trencadis_plugins.draft_length.{name}")
        made: type[Any] = getattr(module, name.title().replace("_", ""))
        length: DraftLength = made(config)
        return length

    return make
