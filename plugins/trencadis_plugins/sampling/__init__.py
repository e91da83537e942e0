"""Built-in samplers: the hook, which imports torch only when a sampler is made."""

from __future__ import annotations

from collections.abc import Iterable

from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Component, ComponentContext, NoConfig, Sampler
from trencadis_plugins.sampling.config import StandardConfig

__all__ = ["trencadis_samplers"]


@hookimpl
def trencadis_samplers() -> Iterable[Component]:
    """Yield ``standard`` and ``greedy``."""
    yield Component(
        name="standard",
        factory=_make_standard,
        config=StandardConfig,
        summary="Masks, bias, penalties, temperature, min-p, top-k and top-p, with draws seeded per request.",
        interface_version=1,
        stability="stable",
        provides=frozenset({"sampling.distributions"}),
    )
    yield Component(
        name="greedy",
        factory=_make_greedy,
        summary="Always the most likely token; refuses requests that ask for anything else.",
        interface_version=1,
        stability="stable",
        provides=frozenset({"sampling.distributions"}),
    )


def _make_standard(config: StandardConfig, context: ComponentContext) -> Sampler:
    from trencadis_plugins.sampling.chain import build_chain
    from trencadis_plugins.sampling.standard import StandardSampler

    chain = build_chain(config.order, chain=config.chain, processors=config.processors, vocabulary=context.vocabulary)
    return StandardSampler(chain, reports_processed=config.logprobs == "processed")


def _make_greedy(config: NoConfig, context: ComponentContext) -> Sampler:
    from trencadis_plugins.sampling.greedy import GreedySampler

    return GreedySampler()
