"""Guard of a KV policy: an exception or an answer out of range is replaced by the contract's default."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

from trencadis.faults import CallMeter, FaultLog, as_words, reraise_interrupt, shown
from trencadis_kv.interfaces import FailureView, KVPolicy, LoadView, PrefillView, SaveView, SourceView

__all__ = ["GuardedPolicy"]

logger = logging.getLogger("trencadis.kv")

T = TypeVar("T")

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

    def admits_save(self, view: SaveView) -> int:
        """Return how many leading blocks are saved, 0 .. ``num_blocks``."""
        return self._asked(
            "admits_save", lambda policy: policy.admits_save(view), lambda answer: _is_whole(answer, view.num_blocks)
        )

    def admits_load(self, view: LoadView) -> float:
        """Return the longest time that the load may take, 0 .. ``timeout_s``."""
        return self._asked(
            "admits_load", lambda policy: policy.admits_load(view), lambda answer: 0.0 <= answer <= view.timeout_s
        )

    def choose_source(self, sources: Sequence[SourceView]) -> int:
        """Return the index of a source."""
        return self._asked(
            "choose_source",
            lambda policy: policy.choose_source(sources),
            lambda answer: _is_whole(answer, len(sources) - 1),
        )

    def prefill_at(self, view: PrefillView) -> int | None:
        """Return the index of an engine, or None."""
        return self._asked(
            "prefill_at",
            lambda policy: policy.prefill_at(view),
            lambda answer: answer is None or _is_whole(answer, len(view.engines) - 1),
        )

    def on_failure(self, view: FailureView) -> Literal["compute", "retry"]:
        """Return the treatment of lost tokens."""
        return self._asked(
            "on_failure", lambda policy: policy.on_failure(view), lambda answer: answer in ("compute", "retry")
        )

    def _asked(self, name: str, ask: Callable[[KVPolicy], T], is_legal: Callable[[T], bool]) -> T:
        """Return the policy's answer if it is valid, else the contract's default."""
        if self._meter.is_off:
            if not self._meter.is_due:
                return ask(_DEFAULTS)
            self._meter.switch_on()
        began_s = self._meter.begin()
        try:
            answer = ask(self.policy)
            took_s = self._meter.end(began_s)
            if is_legal(answer):
                if took_s > self._meter.budget_s and (slow := self._meter.overran(name, took_s)):
                    self._switch_off(slow)
                return answer
            error: BaseException | None = None
            said = f"answered {shown(answer)}, which is out of range"
        except BaseException as raised:
            self._meter.end(began_s)
            reraise_interrupt(raised)
            error, said = raised, f"raised {as_words(raised)}"
        self.num_errors += 1
        said = (
            f"{self._label} {said} in {name}(); the contract's default stands in, here and wherever it happens again."
        )
        self._faults.say(f"{self._label}.{name}", f"{said} Mend it, or choose another in kv_policy.name.", error=error)
        if error is not None:  # an exception that a policy keeps and raises again would gain frames with each call
            error.__traceback__ = None
        return ask(_DEFAULTS)

    def _switch_off(self, fault: str) -> None:
        self.num_errors += 1
        logger.error("%s %s: the contract's defaults stand in %s.", self._label, fault, self._meter.switch_off(fault))


def _is_whole(answer: object, most: int) -> bool:
    return type(answer) is int and 0 <= answer <= most
