"""Where the parts of an engine must agree: with the config, and with each other."""

from __future__ import annotations

import logging

import attrs

from trencadis.config.schema import Config
from trencadis.engine.guards import GuardedBucketing
from trencadis.engine.speculation.drafting import Speculation
from trencadis.engine.speculation.guarded_speculator import check_numbers
from trencadis.errors import CapabilityError, ConfigValueError
from trencadis.interfaces import BackendCapabilities, Speculator
from trencadis.records import Bucket, ModelFacts

__all__ = [
    "ADAPTERS",
    "TREES",
    "check_adapters",
    "check_drafter",
    "check_misses",
    "check_trees",
    "with_drafter",
    "without_sharing",
]

logger = logging.getLogger("trencadis.engine")

ADAPTERS = "backend.adapters"
"""Capability of a backend that computes rows with the LoRA adapters that ``RowStart.adapter`` names."""

TREES = "backend.tree_attention"
"""Capability of a backend that verifies several drafts behind one token."""


def without_sharing(config: Config, capabilities: BackendCapabilities) -> Config:
    """Return the config with prefix caching off if two sequences cannot have a block in common."""
    if capabilities.shares_blocks or not config.cache.prefix_caching:
        return config
    logger.info("Using Contiguous PA, disabling prefix caching")
    return attrs.evolve(config, cache=attrs.evolve(config.cache, prefix_caching=False))


def check_adapters(config: Config, capabilities: BackendCapabilities) -> None:
    """Refuse adapters where none are computed with.

    Raises:
        ConfigValueError: They are asked for, and the backend does not provide them.
    """
    if config.engine.max_loras and ADAPTERS not in capabilities.provides:
        raise ConfigValueError(
            f"[engine] max_loras = {config.engine.max_loras}: the backend does not compute with LoRA adapters (it does not "
            f'provide "{ADAPTERS}"), so a request would get the text of the model itself.',
            hint="Leave it at 0, or choose a backend that serves adapters.",
        )


def check_drafter(speculation: Speculation | None) -> None:
    """Refuse a speculator that no room can be made for.

    Raises:
        ContractError: One of its numbers is none.
    """
    if speculation is not None:
        check_numbers(speculation.labels[0] or type(speculation.speculator).__name__, speculation.speculator)


def check_trees(speculation: Speculation | None, capabilities: BackendCapabilities) -> None:
    """Refuse tree drafts where they cannot be verified.

    Raises:
        CapabilityError: The speculator drafts trees, and the backend or the acceptance rule does not take them.
    """
    if speculation is None or not speculation.speculator.drafts_trees:
        return
    rule = speculation.acceptance
    drafter, rule_name = type(speculation.speculator).__name__, type(getattr(rule, "strategy", rule)).__name__
    if TREES not in capabilities.provides:
        raise CapabilityError(
            f'[speculation]: {drafter} drafts trees, and the backend does not provide "{TREES}".',
            hint="Let it draft linearly, or choose a backend that verifies trees.",
        )
    if not rule.takes_trees:
        raise CapabilityError(
            f"[speculation]: {drafter} drafts trees, and [acceptance] {rule_name} takes linear drafts only.",
            hint='Set acceptance.name to "match" or "tree", or let the speculator draft linearly.',
        )


def with_drafter(model: ModelFacts, drafter: Speculator | None) -> ModelFacts:
    """Return the model with what the drafter keeps for each token counted in."""
    kept = 0 if drafter is None else drafter.kv_bytes_per_token
    return attrs.evolve(model, kv_bytes_per_token=model.kv_bytes_per_token + kept) if kept else model


def check_misses(config: Config, bucketing: GuardedBucketing, buckets: tuple[Bucket, ...]) -> None:
    """Refuse an engine that would refuse every request.

    Raises:
        ConfigValueError: Passes without a prepared bucket are refused, and none is prepared.
    """
    if config.bucketing.on_miss == "refuse" and not buckets:
        why = f"{bucketing.label} lists no bucket" if config.engine.warmup else "engine.warmup is off"
        raise ConfigValueError(
            f'[bucketing] on_miss = "refuse", but {why}: every request would be refused.',
            hint="Set it to fallback, turn engine.warmup on, or choose a bucketing strategy with a table.",
        )
