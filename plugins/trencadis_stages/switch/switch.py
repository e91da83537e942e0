"""Answers which policies schedule, and puts others in their place while the engine serves."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from trencadis.config.dump import dump_options
from trencadis.engine.stage import EngineParts, Makings, Stage
from trencadis.engine.step import SchedulingChanged
from trencadis.errors import ConfigError
from trencadis.switching import SchedulingChange, SchedulingInForce, resolve_change
from trencadis_stages.shadow.shadow import Shadow

__all__ = ["Switch"]

logger = logging.getLogger("trencadis.engine")


class Switch(Stage):
    """Answers ``scheduling``, and changes it by ``set_scheduling``: what is in force changes once all that was asked for is built.

    ``set_scheduling`` takes ``table``, the change, ``source``, who asks, and ``may_import``, whether import paths in it are followed.

    Args:
        makings: Builds other policies; without a builder there is nothing to change.
    """

    def __init__(self, makings: Makings) -> None:
        self._builder = builder = makings.builder
        self._in_force = None if builder is None else SchedulingInForce.at_start(builder.config, builder.plan)
        self.answers = {"scheduling": lambda _: self._report(), "set_scheduling": self._change}

    def bind(self, engine: EngineParts) -> None:
        """Take the policy."""
        self._engine = engine
        self._policy: Any = engine.policy

    def _report(self) -> dict[str, Any]:
        """Return what is in force as a table: names and options, secrets hidden."""
        policy, shadow = self._policy, self._policy.beside
        report: dict[str, Any] = {"shadow": None, "plan_hash": self._engine.state.plan_hash}
        if self._in_force is not None:
            plan = self._in_force.plan
            chosen, fallback = plan.choices["scheduling"], plan.fallbacks.get("scheduling")
            report = {
                "policy": chosen.component.name,
                "options": dump_options(chosen.options),
                "configured": self._in_force.written.scheduling.name,
                "fallback": None if fallback is None else fallback.component.name,
                "shadow": None
                if plan.shadow is None
                else {"policy": plan.shadow.component.name, "options": dump_options(plan.shadow.options)},
                "plan_hash": plan.plan_hash,
            }
        report["component"] = policy.label
        report["quarantined"] = [{"component": label, "cause": cause} for label, cause in policy.quarantines]
        if isinstance(shadow, Shadow):
            report["shadow"] = {**(report["shadow"] or {}), **shadow.report()}
        return report

    def _change(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Put in force what a table asks for; returns what is, and what was.

        Raises:
            ConfigError: The change cannot be; nothing has changed.
            PluginError: The same.
        """
        table = arguments["table"]
        may_import = arguments.get("may_import", False) is True
        change = SchedulingChange.of(table, source=str(arguments["source"]), may_import=may_import)
        builder, policy = self._builder, self._policy
        if builder is None or self._in_force is None:
            raise ConfigError("this engine was composed without plugins: its scheduling cannot be changed.")
        before = self._report()
        new = resolve_change(self._in_force, builder.registry, change)
        plan = new.plan
        made = builder.with_plan(plan).guarded("scheduling") if change.replaces_policy else None
        shadow = None
        if change.shadow is not None and plan.shadow is not None:
            beside = builder.with_plan(new.shadow_plan).make(plan.shadow)
            shadow = Shadow(str(plan.shadow.component), beside, clock=self._engine.state.clock.source)
        if made is not None:
            policy.replace(*made, name=plan.choices["scheduling"].component.name)
        if change.shadow is not None:
            if shadow is not None:
                shadow.introduce(policy.live())
            policy.put_beside(shadow)
        self._in_force, self._engine.state.plan_hash = new, plan.plan_hash
        after, now = self._report(), new.as_change()
        logger.info(
            "Scheduling was changed: %s, shadow %s; plan %s.",
            after["component"],
            after["shadow"]["component"] if after["shadow"] else "none",
            after["plan_hash"],
        )
        asked = {key: value for key, value in now.items() if key in table or (key != "shadow" and "options" in table)}
        self._engine.tell(SchedulingChanged(change=asked, in_force=now, components=plan.code_of("scheduling")))
        return {**after, "previous": {key: before[key] for key in ("policy", "component", "plan_hash")}}
