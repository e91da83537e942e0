"""Makes the components of speculation, and refuses at the start those that backend, executor and sampler do not go with."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from trencadis.engine.stage import Made, Makings
from trencadis.errors import CapabilityError
from trencadis.interfaces import AcceptanceRule, BackendCapabilities, Executor, Sampler, Speculator, SupportsHead
from trencadis.records import SamplingParams
from trencadis_stages.speculation.acceptance import GuardedAcceptance, guarded_acceptance
from trencadis_stages.speculation.guarded_speculator import check_numbers

__all__ = ["Components", "check_speculator", "components_of", "head_of"]

TREES = "backend.tree_attention"
"""Capability of a backend that verifies several drafts after one token."""

HEAD = "backend.head"
"""Capability of a backend that has loaded a head with the model."""


@attrs.frozen(kw_only=True)
class Components:
    """The components that speculation is made of.

    Attributes:
        speculator: Who drafts.
        length: How much.
        acceptance: Which drafts stand.
        supports_drafts: ``supports_drafts(params, branching)``: what the sampler says of a sequence.
        names: Names of the speculator and of its fallback, as the configuration has them.
    """

    speculator: Made
    length: Made
    acceptance: GuardedAcceptance
    supports_drafts: Callable[[SamplingParams, bool], bool] = lambda _, __: True
    names: tuple[str, str] = ("", "")


def components_of(makings: Makings) -> Components:
    """Return the components, which go together and with the executor.

    Raises:
        CapabilityError: They do not; see :func:`check_speculator`.
        ContractError: A number of the speculator is none.
    """
    speculator, length, rule = [_chosen(makings, noun) for noun in ("speculation", "draft_length", "acceptance")]
    made = Components(speculator=speculator, length=length, acceptance=guarded_acceptance(rule))
    if makings.builder is not None:
        plan, (_, sampler, make_fallback) = makings.builder.plan, makings.builder.guarded("sampling")
        fallback = plan.fallbacks.get("speculation")
        made = attrs.evolve(
            made,
            supports_drafts=lambda params, branching: sampler.supports_drafts(params, branching=branching),
            names=(plan.choices["speculation"].component.name, fallback.component.name if fallback else ""),
        )
        samplers = [sampler, *([] if make_fallback is None else [make_fallback()])]
        _check_rule("name", plan.choices["acceptance"].component.name, rule.component, samplers)
        if rule.make_fallback is not None:
            name, one = plan.fallbacks["acceptance"].component.name, rule.make_fallback()
            _check_rule("fallback", name, one, samplers)
            if speculator.component.drafts_trees and not one.supports_trees:
                raise CapabilityError(
                    f"{_spot('fallback', name, one)} takes linear drafts only, and {type(speculator.component).__name__} drafts trees.",
                    hint='Set acceptance.fallback to "match" or "tree".',
                )
    check_speculator(speculator, rule.component, makings.executor)
    return made


def _chosen(makings: Makings, noun: str) -> Made:
    made = makings.made(noun)
    assert made is not None, "the three are chosen together"
    return made


def _spot(key: str, name: str, rule: AcceptanceRule) -> str:
    return f"[acceptance] {key} = {name!r}: {type(rule).__name__}"


def _check_rule(key: str, name: str, rule: AcceptanceRule, samplers: list[Sampler]) -> None:
    """Refuse a rule that the samplers do not show what it needs: what comes by import path declares no capabilities to negotiate."""
    silent = [type(sampler).__name__ for sampler in samplers if type(sampler).verify is Sampler.verify]
    if rule.needs_distributions and silent:
        raise CapabilityError(
            f"{_spot(key, name, rule)} needs the distributions that tokens are drawn from, and the sampler {silent[0]} does not provide them.",
            hint='Set acceptance.name to "match", or sampling.name to "standard"; and so the fallbacks, if there are any.',
        )


def check_speculator(made: Made, rule: AcceptanceRule, executor: Executor) -> None:
    """Refuse a speculator whose drafts cannot be made or verified.

    Raises:
        ContractError: One of its numbers is none.
        CapabilityError: It drafts trees, and the backend or the acceptance rule does not take them; or it drafts with the model's head,
            and none was loaded, or the executor does not reach it.
    """
    speculator: Speculator = made.component
    check_numbers(made.label, speculator)
    if speculator.drafts_trees:
        _check_trees(type(speculator).__name__, rule, executor.capabilities)
    if speculator.uses_head and head_of(executor) is None:
        _refuse_head(type(speculator).__name__, executor)


def _check_trees(drafter: str, rule: AcceptanceRule, capabilities: BackendCapabilities) -> None:
    if TREES not in capabilities.provides:
        raise CapabilityError(
            f'[speculation]: {drafter} drafts trees, and the backend does not provide "{TREES}".',
            hint="Let it draft linearly, or choose a backend that verifies trees.",
        )
    if not rule.supports_trees:
        raise CapabilityError(
            f"[speculation]: {drafter} drafts trees, and [acceptance] {type(rule).__name__} takes linear drafts only.",
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


def head_of(executor: Executor) -> SupportsHead | None:
    """Return what has the model's head draft; None: there is none, or the executor does not reach it."""
    return executor if HEAD in executor.capabilities.provides and isinstance(executor, SupportsHead) else None
