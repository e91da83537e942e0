"""Built-in speculators: they draft tokens for the model to verify."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Component, ComponentContext
from trencadis.interfaces.speculation import INTERFACE_VERSION
from trencadis_plugins.speculation.config import HeadConfig, MixedConfig, NgramConfig, SuffixConfig
from trencadis_plugins.speculation.draft_config import DraftModelConfig, ParallelDraftConfig

if TYPE_CHECKING:
    from trencadis.interfaces import Speculator

__all__ = ["trencadis_speculators"]

_STABLE = frozenset({"ngram", "suffix", "draft_model"})


@hookimpl
def trencadis_speculators() -> Iterable[Component]:
    """Yield the drafters: by look-up, by a model, and a mixture."""
    yield _component("ngram", "What followed the last few tokens when they last occurred in the sequence.", NgramConfig)
    yield _component(
        "suffix", "What most often followed, in the sequence and in its tenant's earlier outputs.", SuffixConfig
    )
    yield _component("draft_model", "A smaller model, token by token, in a line or in a tree.", DraftModelConfig)
    yield _component(
        "parallel_draft", "A model that guesses several tokens in one forward, after mask tokens.", ParallelDraftConfig
    )
    yield _component("head", "A head that was trained for the model and reads its hidden states: EAGLE-3.", HeadConfig)
    yield _component("mixed", "For each request the one of several whose drafts are accepted most.", MixedConfig)


def _component(name: str, summary: str, config: type[Any]) -> Component:
    return Component(
        name=name,
        factory=_maker(name),
        config=config,
        summary=summary,
        interface_version=INTERFACE_VERSION,
        stability="stable" if name in _STABLE else "provisional",
    )


def _maker(name: str) -> Callable[[Any, ComponentContext], Speculator]:
    """Return a factory that imports the speculator's module when it is called; the class is named as the file."""

    def make(config: Any, context: ComponentContext) -> Speculator:
        module = importlib.import_module(f"trencadis_plugins.speculation.{name}")
        made: type[Any] = getattr(module, name.title().replace("_", ""))
        speculator: Speculator = made(config, context)
        return speculator

    return make
