"""Components, guarded: their calls are measured, their answers held to the laws of their contract, and what they raise is contained.

The guard of a component is made from its contract: one function for each method that has a rule (see
:mod:`trencadis.interfaces.laws`). A method that the component leaves at its default is called as it is, so it costs nothing.

A component that raises or breaks a law in a step is quarantined: the configured fallback takes its place, loudly and for
good. Without a fallback the step fails, and the error names the component. One that is too slow is quarantined as well, once its
answer is used, but only for a while: then it is made anew and tried again. Without a fallback it is only warned about.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, Generic, TypeVar, cast

import attrs

from trencadis.errors import StepFailedError
from trencadis.faults import CallMeter, FaultLog, as_words, reraise_interrupt
from trencadis.interfaces.laws import Rule, rules_of

__all__ = ["Fallback", "Guard", "Guarded", "TooSlowError"]

logger = logging.getLogger("trencadis.engine")

S = TypeVar("S")

Call = Callable[..., Any]


class TooSlowError(Exception):
    """A component took too long, too often; says how long, and what it may take."""


@attrs.frozen
class Fallback(Generic[S]):
    """Makes what takes over from a component.

    Attributes:
        label: Names the component and its distribution in messages.
        make: Its factory.
        remake: Makes the component anew that it takes over from; None: that is not tried again.
    """

    label: str
    make: Callable[[], S]
    remake: Callable[[], S] | None = None

    def __call__(self) -> S:
        """Return a new one."""
        return self.make()


class Guard(Generic[S]):
    """Calls a component by the rules of its contract.

    Args:
        contract: Its methods with a rule are guarded.
        label: Names the component and its distribution in messages.
        strategy: The component.
        meter: Measures its calls; None: nothing is measured.
        capabilities: Contracts beside it that a component may have.

    Attributes:
        ask: The guarded methods. A guard that inherits the contract has them itself, and calls the others as they are, but for those that
            its class overrides.
        label: Names what is in place in messages.
    """

    def __init__(
        self,
        contract: Callable[..., S],
        label: str,
        strategy: S,
        *,
        meter: CallMeter | None = None,
        capabilities: tuple[type, ...] = (),
    ) -> None:
        self.label = label
        self.ask = cast("S", SimpleNamespace())
        self._contract = cast("type", contract)
        self._rules = {
            name: (one, rule) for one in (*capabilities, self._contract) for name, rule in rules_of(one).items()
        }
        self._meter = meter or CallMeter(label)
        self._faults = FaultLog(logger)
        self._plain: dict[str, Call] = {}
        self._inherited: list[str] = []
        if isinstance(self, self._contract):
            self._inherited = [name for name in _methods(self._contract) if _is_default(self, self._contract, name)]
        self._beside: Any = None
        self.strategy = strategy

    @property
    def strategy(self) -> S:
        """The component in place; another may be put there between two calls."""
        return self._strategy

    @strategy.setter
    def strategy(self, strategy: S) -> None:
        self._strategy = strategy
        for name, (contract, rule) in self._rules.items():
            if contract is not self._contract and not isinstance(strategy, contract):
                call = self._plain[name] = _lacking(rule)
            else:
                call = getattr(strategy, name)
                if rule.calls_others or self._readiness(rule) is not None or not _is_default(strategy, contract, name):
                    call = self._made(rule, call)
                self._plain[name] = call
            call = call if self._beside is None else self._with_other(rule, call)
            setattr(self.ask, name, call)
        for name in self._inherited:
            vars(self)[name] = getattr(self.ask if name in self._rules else strategy, name)

    def put_beside(self, other: Any) -> None:
        """Have another object be told of each call: its method of the same name gets the answer and the arguments; None: no longer."""
        self._beside = other
        self.strategy = self._strategy

    def _made(self, rule: Rule, call: Call) -> Call:
        """Return the function that calls a method."""
        meter, further = self._meter, getattr(self, f"_check_{rule.method}", None)
        check = None if rule.check_of is None else rule.check_of(self._strategy)
        begin, end, is_ready = meter.begin, meter.end, self._readiness(rule)

        def guarded(*args: Any, **named: Any) -> Any:
            if is_ready is not None and not is_ready():
                return self._instead(rule, args, named)
            began = begin()
            try:
                answer = call(*args, **named)
                took_s = end(began)
                if check is not None:
                    answer = check(answer, args, named)
                if further is not None:
                    answer = further(answer, args, named)
            except BaseException as error:
                end(began)
                reraise_interrupt(error)
                return self._failed(rule, error, args, named)
            if took_s > meter.budget_s:
                self._note_slow(rule.method, took_s, num_budgets=rule.num_budgets(args, named))
            return answer

        return guarded

    def _with_other(self, rule: Rule, call: Call) -> Call:
        other = getattr(self._beside, rule.method, None)
        if other is None:
            return call

        def both(*args: Any, **named: Any) -> Any:
            if rule.is_told:
                other(*args, **named)
                return call(*args, **named)
            answer = call(*args, **named)
            other(answer, *args, **named)
            return answer

        return both

    # ------------------------------------------------------------------------------------------- kinds of containment

    def _readiness(self, rule: Rule) -> Callable[[], bool] | None:
        """Return what says whether the component may be called now; None: it always may."""
        raise NotImplementedError

    def _instead(self, rule: Rule, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Return the answer to a call that is not made."""
        raise NotImplementedError

    def _failed(self, rule: Rule, error: BaseException, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Return the answer to a call that raised or that broke a law."""
        raise NotImplementedError

    def _note_slow(self, method: str, took_s: float, *, num_budgets: float) -> None:
        """Look at a call that took longer than its budget."""
        raise NotImplementedError


class Guarded(Guard[S]):
    """A component whose place its fallback takes.

    Args:
        contract: See :class:`Guard`.
        label: See :class:`Guard`.
        strategy: The chosen component.
        make_fallback: Makes the fallback; None if the config names none.
        meter: See :class:`Guard`.
        capabilities: See :class:`Guard`.
        ends_if_slow: Fail when it is too slow and there is no fallback.

    Attributes:
        num_quarantined: Components that failed or were too slow.
        is_replaced: A fallback is in place.
    """

    def __init__(
        self,
        contract: Callable[..., S],
        label: str,
        strategy: S,
        make_fallback: Callable[[], S] | None = None,
        *,
        meter: CallMeter | None = None,
        capabilities: tuple[type, ...] = (),
        ends_if_slow: bool = False,
    ) -> None:
        self.num_quarantined = 0
        self.is_replaced = False
        self._make_fallback = make_fallback
        self._ends_if_slow = ends_if_slow
        self._resting: tuple[str, Fallback[S]] | None = None
        super().__init__(contract, label, strategy, meter=meter, capabilities=capabilities)

    def quarantine(self, cause: BaseException) -> None:
        """Put the fallback in the component's place.

        Raises:
            StepFailedError: There is none, or the fallback itself failed.
        """
        fault = str(cause) if isinstance(cause, TooSlowError) else f"raised {as_words(cause)}"
        if self._make_fallback is None:
            raise StepFailedError(
                f"{self.label} {fault}.",
                hint="Mend or replace the component, or name a fallback in its config table.",
            ) from cause
        make_fallback, self._make_fallback = self._make_fallback, None
        traced: BaseException | None = cause
        how_long = "for good"
        if isinstance(cause, TooSlowError):
            traced = self._resting = None
            if isinstance(make_fallback, Fallback) and make_fallback.remake is not None:
                self._resting = self.label, make_fallback
            how_long = self._meter.switch_off(fault, for_good=self._resting is None)
        self._faults.say(
            self.label, f"{self.label} {fault}; its fallback takes over {how_long}.", error=traced, level=logging.ERROR
        )
        self.num_quarantined += 1
        self.is_replaced = True
        try:
            self.strategy = make_fallback()
        except Exception as error:
            raise StepFailedError(f"the fallback of {self.label} could not be built: {as_words(error)}.") from error
        own = make_fallback.label if isinstance(make_fallback, Fallback) else ""
        self._put(f"{own} (fallback of {self.label})" if own else f"fallback of {self.label}")

    def try_again(self) -> None:
        """Put a component that was too slow back in place, made anew, once it has rested; 0.1 µs if there is none."""
        if self._is_in_force():
            return
        assert self._resting is not None
        (label, fallback), self._resting = self._resting, None
        self._meter.switch_on()
        try:
            assert fallback.remake is not None
            self._put_back(label, fallback.remake(), fallback)
        except BaseException as error:
            reraise_interrupt(error)
            logger.error("%s could not be made anew: its fallback stays. %s", label, as_words(error))
        else:
            logger.warning("%s is tried again.", label)

    def _is_in_force(self) -> bool:
        """Return whether the component in place stays there: none that rested is to be tried again."""
        return self._resting is None or not self._meter.is_due

    def _put_back(self, label: str, strategy: S, fallback: Fallback[S]) -> None:
        """Put the chosen component in place again."""
        self._put(label)
        self.strategy, self._make_fallback, self.is_replaced = strategy, fallback, False

    def _put(self, label: str) -> None:
        """Call what is in place by another name."""
        self.label = label
        self._meter.rename(label)

    def _readiness(self, rule: Rule) -> Callable[[], bool] | None:
        return self._is_in_force if rule.opens and self._resting is not None else None

    def _instead(self, rule: Rule, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        self.try_again()
        return self._plain[rule.method](*args, **named)

    def _failed(self, rule: Rule, error: BaseException, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        self.quarantine(error)
        return None if rule.is_told else self._plain[rule.method](*args, **named)

    def _note_slow(self, method: str, took_s: float, *, num_budgets: float) -> None:
        fault = self._meter.overran(method, took_s, num_budgets=num_budgets)
        if not fault:
            return
        if self._make_fallback is not None or self._ends_if_slow:
            self.quarantine(TooSlowError(fault))
        else:
            self._faults.say(
                f"{self.label}.{method} is too slow",
                f"{self.label} {fault}; steps go on waiting for it. Mend it, or name a fallback in its config table.",
            )


def _is_default(component: object, contract: type, method: str) -> bool:
    """Return whether a component leaves a method as its contract defines it: then there is nothing to call or to guard."""
    own, default = getattr(type(component), method, None), getattr(contract, method)
    return own is default and method not in getattr(component, "__dict__", ())


def _methods(contract: type) -> list[str]:
    return [name for name in dir(contract) if not name.startswith("_") and callable(getattr(contract, name))]


def _lacking(rule: Rule) -> Call:
    """Return what stands for a method that a component does not have."""
    return lambda *_, **__: rule.otherwise
