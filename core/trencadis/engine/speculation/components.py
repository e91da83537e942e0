"""Makes the components of speculation, and refuses at the start those that backend, executor and sampler do not go with."""

from __future__ import annotations

import functools
from collections.abc import Callable

import attrs

from trencadis.engine.sampling.guarded import GuardedAcceptance
from trencadis.engine.sampling.requests import Sampling
from trencadis.engine.speculation.drafting import Drafting, Speculation, check_numbers
from trencadis.engine.state import EngineState
from trencadis.errors import CapabilityError
from trencadis.interfaces import AcceptanceRule, BackendCapabilities, Executor, Sampler, Speculator, SupportsHead
from trencadis.records import BucketLimits, ModelFacts
from trencadis.registry.building import Builder, Meters

__all__ = ["check_speculation", "make_drafting", "make_speculation", "with_drafter"]

TREES = "backend.tree_attention"
"""Capability of a backend that verifies several drafts after one token."""

HEAD = "backend.head"
"""Capability of a backend that has loaded a head with the model."""


def make_speculation(builder: Builder, sampling: Sampling) -> Speculation | None:
    """Return the components of speculation; None if it is not configured.

    Raises:
        CapabilityError: Acceptance rule, sampler and speculator do not go together.
    """
    choices = builder.plan.choices
    if "speculation" not in choices:
        return None
    drafter, length = builder.guarded("speculation"), builder.guarded("draft_length")
    fallback = builder.plan.fallbacks.get("speculation")
    return Speculation(
        speculator=drafter[1],
        length=length[1],
        labels=(drafter[0], length[0]),
        names=(choices["speculation"].component.name, fallback.component.name if fallback else ""),
        make_fallbacks=(drafter[2], length[2]),
        acceptance=_acceptance(builder, sampling, drafter[1]),
        supports_drafts=sampling.supports_drafts,
    )


def _acceptance(builder: Builder, sampling: Sampling, speculator: Speculator) -> AcceptanceRule:
    label, rule, make_fallback = builder.guarded("acceptance")
    rules = {"name": (builder.plan.choices["acceptance"], rule)}
    if make_fallback is not None:
        rules["fallback"] = builder.plan.fallbacks["acceptance"], make_fallback()
    samplers = [sampling.sampler(), *([] if (made := builder.guarded("sampling")[2]) is None else [made()])]
    for key, (choice, one) in rules.items():
        where = f"[acceptance] {key} = {choice.component.name!r}: {type(one).__name__}"
        # What comes by import path declares no capabilities, so that they were not negotiated.
        silent = [type(sampler).__name__ for sampler in samplers if type(sampler).verify is Sampler.verify]
        if one.needs_distributions and silent:
            raise CapabilityError(
                f"{where} needs the distributions that tokens are drawn from, and the sampler {silent[0]} does not provide them.",
                hint='Set acceptance.name to "match", or sampling.name to "standard"; and so the fallbacks, if there are any.',
            )
        if key == "fallback" and speculator.drafts_trees and not one.supports_trees:
            raise CapabilityError(
                f"{where} takes linear drafts only, and {type(speculator).__name__} drafts trees.",
                hint='Set acceptance.fallback to "match" or "tree".',
            )
    return GuardedAcceptance(label, rule, make_fallback, remake=functools.partial(_acceptance_in_rank, builder))


def _acceptance_in_rank(builder: Builder) -> AcceptanceRule:
    """Return the acceptance rule again, in a process of a rank, where a builder of the same configuration is passed."""
    return GuardedAcceptance(*builder.guarded("acceptance"))


def make_drafting(
    speculation: Speculation | None,
    state: EngineState,
    executor: Executor,
    model: ModelFacts,
    limits: BucketLimits,
    padded_tokens: Callable[[int, int], int],
    meters: Meters,
) -> Drafting:
    """Return the part that has drafts made, with its memory allocated."""
    drafting = Drafting(
        state,
        speculation,
        padded_tokens=padded_tokens,
        pads=executor.capabilities.layout == "padded",
        vocab_size=model.vocab_size,
        head=_head_of(executor),
        meter_of=meters,
    )
    drafting.allocate(limits)
    return drafting


def check_speculation(speculation: Speculation | None, executor: Executor) -> None:
    """Refuse a speculator whose drafts cannot be made or verified.

    Raises:
        ContractError: One of its numbers is none.
        CapabilityError: It drafts trees, and the backend or the acceptance rule does not take them; or it drafts with the model's head,
            and none was loaded, or the executor does not reach it.
    """
    if speculation is None:
        return
    speculator = speculation.speculator
    check_numbers(speculation.labels[0] or type(speculator).__name__, speculator)
    if speculator.drafts_trees:
        _check_trees(speculation, executor.capabilities)
    if speculator.uses_head and _head_of(executor) is None:
        _refuse_head(type(speculator).__name__, executor)


def _check_trees(speculation: Speculation, capabilities: BackendCapabilities) -> None:
    rule = speculation.acceptance
    drafter, rule_name = type(speculation.speculator).__name__, type(getattr(rule, "strategy", rule)).__name__
    if TREES not in capabilities.provides:
        raise CapabilityError(
            f'[speculation]: {drafter} drafts trees, and the backend does not provide "{TREES}".',
            hint="Let it draft linearly, or choose a backend that verifies trees.",
        )
    if not rule.supports_trees:
        raise CapabilityError(
            f"[speculation]: {drafter} drafts trees, and [acceptance] {rule_name} takes linear drafts only.",
            hint='Set acceptance.name to "match" or "tree", or let the speculator draft linearly.',
        )


def _refuse_head(drafter: str, executor: Executor) -> None:
    if HEAD in executor.capabilities.provides:
        raise CapabilityError(
            f"[speculation]: {drafter} drafts with the model's head, and {type(executor).__name__} does not reach it.",
            hint='Set executor.name to "inline", or choose another speculator.',
        )
    raise CapabilityError(
        f"[speculation]: {drafter} drafts with a head of the model, and none was loaded.",
        hint="Set model.head to the directory of a head that was trained for this model, to demo-head for the demo, or to mtp if its files bring one; or choose another speculator.",
    )


def _head_of(executor: Executor) -> SupportsHead | None:
    """Return what has the model's head draft; None: there is none, or the executor does not reach it."""
    return executor if HEAD in executor.capabilities.provides and isinstance(executor, SupportsHead) else None


def with_drafter(model: ModelFacts, drafter: Speculator | None) -> ModelFacts:
    """Return the model with what the drafter keeps for each token counted in."""
    kept = 0 if drafter is None else drafter.kv_bytes_per_token
    return attrs.evolve(model, kv_bytes_per_token=model.kv_bytes_per_token + kept) if kept else model
