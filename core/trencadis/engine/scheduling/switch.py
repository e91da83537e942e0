"""Builds the policies that a change of scheduling asks for; what is in force changes only when the change is accepted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from trencadis.config.dump import dump_options
from trencadis.faults import Fallback
from trencadis.interfaces import SchedulingPolicy
from trencadis.registry import Choice, Registry, ResolvedPlan
from trencadis.registry.switching import SchedulingChange, SchedulingInForce, resolve_change

__all__ = ["PreparedScheduling", "SchedulingSwitch"]


@attrs.frozen(kw_only=True)
class PreparedScheduling:
    """Policies that are built and wait to take over.

    Attributes:
        in_force: What will be.
        policy: Label, policy, and maker of its fallback or None; None: the present policy stays.
        shadow: Label and policy; None: there will be none, or the present one stays.
        replaces_shadow: Whether the present shadow goes.
    """

    in_force: SchedulingInForce
    policy: tuple[str, SchedulingPolicy, Callable[[], SchedulingPolicy] | None] | None
    shadow: tuple[str, SchedulingPolicy] | None
    replaces_shadow: bool


class SchedulingSwitch:
    """Resolves changes through the registry, as the configuration was.

    Args:
        registry: The plugins.
        in_force: What the configuration put in force.
        make: Builds a component by a plan.

    Attributes:
        in_force: What is in force now.
    """

    def __init__(
        self, registry: Registry, in_force: SchedulingInForce, make: Callable[[ResolvedPlan, Choice], Any]
    ) -> None:
        self.in_force = in_force
        self._registry = registry
        self._make = make

    def prepare(self, change: SchedulingChange) -> PreparedScheduling:
        """Return what a change asks for, built; nothing has changed yet.

        Raises:
            ConfigError: See :func:`trencadis.registry.switching.resolve_change`.
            PluginError: As of the same, or a factory raised.
        """
        new = resolve_change(self.in_force, self._registry, change)
        shadow = new.plan.shadow if change.shadow is not None else None
        return PreparedScheduling(
            in_force=new,
            policy=self._policy(new.plan) if change.replaces_policy else None,
            shadow=None if shadow is None else (str(shadow.component), self._make(new.shadow_plan, shadow)),
            replaces_shadow=change.shadow is not None,
        )

    def accept(self, prepared: PreparedScheduling) -> None:
        """Note that prepared policies have taken over."""
        self.in_force = prepared.in_force

    def _policy(self, plan: ResolvedPlan) -> tuple[str, SchedulingPolicy, Callable[[], SchedulingPolicy] | None]:
        chosen, fallback = plan.choices["scheduling"], plan.fallbacks.get("scheduling")
        make_fallback = None
        if fallback is not None and fallback.component != chosen.component:
            make_fallback = Fallback(
                str(fallback.component), lambda: self._make(plan, fallback), lambda: self._make(plan, chosen)
            )
        return str(chosen.component), self._make(plan, chosen), make_fallback

    def report(self) -> Mapping[str, Any]:
        """Return what is in force as a table: names and options, secrets hidden."""
        plan = self.in_force.plan
        chosen, fallback = plan.choices["scheduling"], plan.fallbacks.get("scheduling")
        return {
            "policy": chosen.component.name,
            "options": dump_options(chosen.options),
            "configured": self.in_force.written.scheduling.name,
            "fallback": None if fallback is None else fallback.component.name,
            "shadow": None
            if plan.shadow is None
            else {"policy": plan.shadow.component.name, "options": dump_options(plan.shadow.options)},
            "plan_hash": plan.plan_hash,
        }
