"""Questions that an operator asks an engine, and what may be changed while it serves: scheduling, and its role.

Questions and answers are tables of plain values, the same whether the engine is in this process or in another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from trencadis.engine.inspect.off import off_table
from trencadis.engine.scheduling.guarded import GuardedScheduling
from trencadis.engine.scheduling.shadow import Shadow
from trencadis.engine.scheduling.switch import PreparedScheduling, SchedulingSwitch
from trencadis.engine.state import EngineState
from trencadis.errors import ConfigError, InternalError, InvalidRequestError, TrencadisError
from trencadis.records.flight_record import ComponentCode
from trencadis.registry.switching import SchedulingChange

__all__ = ["Administration"]

logger = logging.getLogger("trencadis.engine")


class Administration:
    """Answers for one engine. Called on its thread, between two steps.

    Args:
        state: The engine's state, read only.
        policy: The guarded scheduling policy.
        switch: Builds other policies; None: scheduling cannot be changed.
        plan_hash: Hash of the plan that the engine was built by.
    """

    def __init__(
        self,
        state: EngineState,
        policy: GuardedScheduling,
        *,
        switch: SchedulingSwitch | None = None,
        plan_hash: str = "",
    ) -> None:
        self._state = state
        self._policy = policy
        self._switch = switch
        self._plan_hash = plan_hash
        self._answers: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "scheduling": self._scheduling,
            "set_scheduling": self._set_scheduling,
            "switched_off": lambda _: off_table(),
        }

    @property
    def plan_hash(self) -> str:
        """Hash of the plan in force."""
        return self._switch.in_force.plan.plan_hash if self._switch is not None else self._plan_hash

    def answer(self, question: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a question.

        Args:
            question: ``scheduling``, ``switched_off`` or ``set_scheduling``.
            arguments: None; none; or ``table``, the change, ``source``, who asks, and ``may_import``, whether import paths in it are
                followed.

        Raises:
            ConfigError: The change cannot be; nothing has changed.
            PluginError: The same.
            InvalidRequestError: No such question, or the request is not known.
            InternalError: Anything else went wrong.
        """
        answer = self._answers.get(question)
        if answer is not None:
            return self.answered(question, answer, arguments)
        if question in ("replicas", "restart_replica", "route"):
            raise InvalidRequestError("there is one engine only.", hint="Set parallel.data for several.")
        raise InvalidRequestError(f"there is no question {question!r}.")

    def answered(
        self, question: str, answer: Callable[[Mapping[str, Any]], dict[str, Any]], arguments: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the answer of a part of the engine to a question.

        Raises:
            TrencadisError: The part raised it; an ``InternalError`` stands for anything else.
        """
        try:
            return answer(arguments)
        except TrencadisError:
            raise
        except Exception as error:  # a question must not end the engine
            logger.exception("The question %r could not be answered.", question)
            raise InternalError(f"{question} could not be answered: {type(error).__name__}: {error}.") from error

    def _scheduling(self, _: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
        policy, shadow = self._policy, self._policy.shadow
        report: dict[str, Any] = (
            dict(self._switch.report()) if self._switch is not None else {"shadow": None, "plan_hash": self.plan_hash}
        )
        report["component"] = policy.label
        report["quarantined"] = [{"component": label, "cause": cause} for label, cause in policy.quarantines]
        if shadow is not None:
            report["shadow"] = {**(report["shadow"] or {}), **shadow.report()}
        return report

    def _set_scheduling(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        change = SchedulingChange.of(
            arguments["table"],
            source=str(arguments["source"]),
            may_import=arguments.get("may_import", False) is True,
        )
        if self._switch is None:
            raise ConfigError("this engine was composed without plugins: its scheduling cannot be changed.")
        before = self._scheduling()
        prepared = self._switch.prepare(change)
        if prepared.policy is not None:
            name = prepared.in_force.plan.choices["scheduling"].component.name
            self._policy.replace(*prepared.policy, name=name)
        self._put_shadow(prepared)
        self._switch.accept(prepared)
        after = self._scheduling()
        logger.info(
            "Scheduling was changed: %s, shadow %s; plan %s.",
            after["component"],
            after["shadow"]["component"] if after["shadow"] else "none",
            after["plan_hash"],
        )
        return {**after, "previous": {key: before[key] for key in ("policy", "component", "plan_hash")}}

    def scheduling_in_force(
        self, table: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any], Mapping[str, ComponentCode]]:
        """Return what a flight record says of a change that was just made: its table, what is in force, and the components that schedule.

        Args:
            table: The table of the change; options are returned as they are in force, without secrets.
        """
        assert self._switch is not None, "scheduling was changed"
        now = self._switch.in_force.as_change()
        change = {key: value for key, value in now.items() if key in table or (key != "shadow" and "options" in table)}
        return change, now, self._switch.in_force.plan.code_of("scheduling")

    def _put_shadow(self, prepared: PreparedScheduling) -> None:
        if not prepared.replaces_shadow:
            return
        shadow = None
        if prepared.shadow is not None:
            shadow = Shadow(*prepared.shadow, clock=self._state.clock.source)
            shadow.introduce(self._policy.live())
        self._policy.put_shadow(shadow)
