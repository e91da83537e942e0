"""Guard of a KV policy: an exception or an answer out of range is replaced by the contract's default."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from trencadis.faults import CallMeter, FaultLog, as_words, reraise_interrupt, shown
from trencadis.interfaces import legal, rules_of
from trencadis_kv.interfaces import KVPolicy

__all__ = ["GuardedPolicy"]

logger = logging.getLogger("trencadis.kv")

_DEFAULTS = KVPolicy()


class GuardedPolicy(KVPolicy):
    """Calls a policy and returns valid answers only.

    Args:
        policy: Policy to call.
        label: Name of the component and its distribution, for messages; empty: the name of its class.
        meter: Measures the policy's calls; while it is switched off as too slow, the defaults answer.

    Attributes:
        policy: Policy to call.
        num_errors: Number of answers that were replaced, and of times it was switched off.
    """

    def __init__(self, policy: KVPolicy, *, label: str = "", meter: CallMeter | None = None) -> None:
        self.policy = policy
        self.num_errors = 0
        self._label = label or f"the KV policy {type(policy).__name__}"
        self._meter = meter or CallMeter(self._label)
        self._faults = FaultLog(logger)

        for name in rules_of(KVPolicy):
            setattr(self, name, partial(self._asked, name))

    def _asked(self, name: str, view: Any) -> Any:
        """Return the policy's answer if it is legal, else the contract's default."""
        if self._meter.is_off:
            if not self._meter.is_due:
                return getattr(_DEFAULTS, name)(view)
            self._meter.switch_on()
        answer, error = None, None
        began_s = self._meter.begin()
        try:
            answer = getattr(self.policy, name)(view)
            took_s = self._meter.end(began_s)
        except BaseException as raised:
            self._meter.end(began_s)
            reraise_interrupt(raised)
            error, said = raised, f"raised {as_words(raised)}"
        else:
            try:
                answer = legal(getattr(KVPolicy, name), answer, view)
            except Exception:
                said = f"answered {shown(answer)}, which is out of range"
            else:
                if took_s > self._meter.budget_s and (slow := self._meter.overran(name, took_s)):
                    self._switch_off(slow)
                return answer
        self.num_errors += 1
        said = (
            f"{self._label} {said} in {name}(); the contract's default stands in, here and wherever it happens again."
        )
        self._faults.say(f"{self._label}.{name}", f"{said} Mend it, or choose another in kv_policy.name.", error=error)
        if error is not None:  # an exception that a policy keeps and raises again would gain frames with each call
            error.__traceback__ = None
        return getattr(_DEFAULTS, name)(view)

    def _switch_off(self, fault: str) -> None:
        self.num_errors += 1
        logger.error("%s %s: the contract's defaults stand in %s.", self._label, fault, self._meter.switch_off(fault))
