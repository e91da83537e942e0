"""Built-in acceptance rules: which drafts are accepted, and the token after them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Component, ComponentContext, NoConfig
from trencadis.interfaces.acceptance import INTERFACE_VERSION
from trencadis_plugins.acceptance.config import TypicalConfig

if TYPE_CHECKING:
    from trencadis.interfaces import AcceptanceRule

__all__ = ["trencadis_acceptance_rules"]

_STABLE = frozenset({"match", "token", "block"})

_DISTRIBUTIONS = "sampling.distributions"


@hookimpl
def trencadis_acceptance_rules() -> Iterable[Component]:
    """Yield the lossless rules, then those that are not."""
    yield _component(
        "match", "Drafts stand while the ordinary sampler chooses them: the text is that of no speculation."
    )
    yield _component(
        "token", "Rejection sampling, draft by draft: more drawn drafts stand than match.", requires=[_DISTRIBUTIONS]
    )
    yield _component(
        "block", "Rejection sampling of a whole run: more stand than draft by draft.", requires=[_DISTRIBUTIONS]
    )
    yield _component("tree", "Rejection sampling over several drafts after one token.", requires=[_DISTRIBUTIONS])
    yield _component(
        "typical", "Lossy: what the model finds plausible stands.", TypicalConfig, requires=[_DISTRIBUTIONS]
    )


def _component(name: str, summary: str, config: type[Any] = NoConfig, *, requires: Iterable[str] = ()) -> Component:
    return Component(
        name=name,
        factory=_maker(name, config),
        config=config,
        summary=summary,
        interface_version=INTERFACE_VERSION,
        stability="stable" if name in _STABLE else "provisional",
        requires=frozenset(requires),
    )


def _maker(name: str, config_class: type[Any]) -> Callable[[Any, ComponentContext], AcceptanceRule]:
    """Return a factory that imports the rule's module when it is called; the class is named as the file."""

    def make(config: Any, context: ComponentContext) -> AcceptanceRule:
        module = importlib.import_module(f"trencadis_plugins.acceptance.{name}")
        made: type[Any] = getattr(module, name.title().replace("_", ""))
        rule: AcceptanceRule = made() if config_class is NoConfig else made(config)
        return rule

    return make
