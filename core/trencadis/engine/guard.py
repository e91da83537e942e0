"""Components, guarded: their calls are measured, their answers held to the laws of their contract, and what they raise is contained.

The guard of a component is made from its contract: one function for each method that has a rule (see
:mod:`trencadis.interfaces.laws`). A method that the component leaves at its default is called as it is, so it costs nothing.

A component that raises or breaks a law in a step is quarantined: the configured fallback takes its place, loudly and for
good. Without a fallback the step fails, and the error names the component. One that is too slow is quarantined as well, once its
answer is used, but only for a while: then it is made anew and tried again. Without a fallback it is only warned about. A component
without which steps go on is contained instead: where it raises, its part is left out of the step.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar, Generic, TypeVar, cast

from trencadis.errors import StepFailedError
from trencadis.faults import CallMeter, Fallback, FaultLog, as_words, reraise_interrupt
from trencadis.interfaces.laws import Rule, rules_of

__all__ = ["Contained", "Guard", "Guarded", "TooSlowError"]

logger = logging.getLogger("trencadis.engine")

S = TypeVar("S")

Call = Callable[..., Any]


_MADE = """\
def make(_guard, _rule, _call, _meter, self, _further, _is_ready):
    _begin, _end = _meter.begin, _meter.end
    def {method}({declared}):{readiness}
        _began = _begin()
        try:
            _answer = _call({passed})
            _took_s = _end(_began){law}{further}
        except BaseException as _error:
            _end(_began)
            _reraise_interrupt(_error)
            return _guard._failed(_rule, _error, {packed})
        if _took_s > _meter.budget_s:
            _guard._note_slow(_rule, _took_s, _rule.num_budgets({passed}))
        return _answer
    return {method}
"""
"""How a method is called: written out for each, as attrs writes ``__init__``, since packing and reading arguments would take as long again."""


class TooSlowError(Exception):
    """A component took too long, too often; says how long, and what it may take."""


class Guard(Generic[S]):
    """Calls a component by the rules of its contract.

    Args:
        contract: Methods of it with a rule are guarded.
        label: Names the component and its distribution in messages.
        strategy: The component.
        meter: Measures its calls; None: nothing is measured.
        capabilities: Contracts beside it that a component may have.

    Attributes:
        ask: The guarded methods. The guard itself has them, too, but for those that its class defines; one that inherits the contract has
            also the component's other methods, as they are.
        label: Names what is in place in messages.
        beside: The object that is told of each call, or None; see :meth:`put_beside`.
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
        own = isinstance(self, self._contract)
        names = [
            one for one in dir(contract) if own and one[0] != "_" and callable(getattr(contract, one))
        ] or self._rules
        self._offered = [name for name in names if _is_undefined(type(self), self._contract, name)]
        self.beside: Any = None
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
                if self._wraps_default(rule) or not _is_default(strategy, contract, name):
                    call = self._made(rule, call)
                self._plain[name] = call
            call = call if self.beside is None else self._with_other(rule, call)
            setattr(self.ask, name, call)
        for name in self._offered:
            vars(self)[name] = getattr(self.ask if name in self._rules else strategy, name)
        self._note_strategy()

    def _note_strategy(self) -> None:
        """Read what is to be known of the component in place."""

    def put_beside(self, other: Any) -> None:
        """Have another object be told of each call: its method of the same name gets the answer and the arguments; None: no longer.

        One beside the scheduling policy has ``take_step()``, too, which returns further fields of ``StepStats`` for the step that was planned.
        """
        self.beside = other
        self.strategy = self._strategy

    def _made(self, rule: Rule, call: Call) -> Call:
        """Return the function that calls a method."""
        meter, further, is_ready = self._meter, self._further(rule), self._readiness(rule)
        make = _maker(rule, can_rest=is_ready is not None, looks_further=further is not None)
        made: Call = make(self, rule, call, meter, self._strategy, further, is_ready)
        return made

    def _with_other(self, rule: Rule, call: Call) -> Call:
        other = getattr(self.beside, rule.method, None)
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

    def _wraps_default(self, rule: Rule) -> bool:
        """Return whether a method is guarded even where the component leaves it at the default of the contract."""
        return rule.calls_others

    def _further(self, rule: Rule) -> Call | None:
        """Return what an answer has to pass after the law, which may change it; None: there is nothing more to look at."""
        return getattr(self, f"_check_{rule.method}", None)

    def _readiness(self, rule: Rule) -> Callable[[], bool] | None:
        """Return what says whether the component may be called now; None: it always may."""
        raise NotImplementedError

    def _instead(self, rule: Rule, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Return the answer to a call that is not made."""
        raise NotImplementedError

    def _failed(self, rule: Rule, error: BaseException, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Return the answer to a call that raised or that broke a law."""
        raise NotImplementedError

    def _note_slow(self, rule: Rule, took_s: float, num_budgets: float) -> None:
        """Look at a call that took longer than its budget."""
        raise NotImplementedError


class Guarded(Guard[S]):
    """A component whose place its fallback takes.

    Args:
        contract: See :class:`Guard`.
        label: See :class:`Guard`.
        strategy: The chosen component.
        make_fallback: Makes the fallback; None if the config names none.
        ends_if_slow: Fail when it is too slow and there is no fallback.
        options: Other arguments of :class:`Guard`.

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
        ends_if_slow: bool = False,
        **options: Any,
    ) -> None:
        self.num_quarantined = 0
        self.is_replaced = False
        self._make_fallback = make_fallback
        self._ends_if_slow = ends_if_slow
        self._resting: tuple[str, Fallback[S]] | None = None
        super().__init__(contract, label, strategy, **options)

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

    def _wraps_default(self, rule: Rule) -> bool:
        return rule.calls_others or self._readiness(rule) is not None

    def _instead(self, rule: Rule, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        self.try_again()
        return self._plain[rule.method](*args, **named)

    def _failed(self, rule: Rule, error: BaseException, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        self.quarantine(error)
        return None if rule.is_told else self._plain[rule.method](*args, **named)

    def _note_slow(self, rule: Rule, took_s: float, num_budgets: float) -> None:
        fault = self._meter.overran(rule.method, took_s, num_budgets=num_budgets)
        if not fault:
            return
        if self._make_fallback is not None or self._ends_if_slow:
            self.quarantine(TooSlowError(fault))
        else:
            self._faults.say(
                f"{self.label}.{rule.method} is too slow",
                f"{self.label} {fault}; steps go on waiting for it. Mend it, or name a fallback in its config table.",
            )


class Contained(Guard[S]):
    """A component without which things go on: what it raises counts as the answer of the rule that brings nothing.

    It is switched off for a while if it is too slow, or raised too often in a row.

    Attributes:
        consequence: End of the line that is logged when a call raised; it follows "… raised X in method()".
        off: Follows why the component is switched off; ``{how_long}`` is replaced.
        back: It is called again.
        max_errors: Errors in a row after which it is off; 0: no number is too many.
        num_errors: Calls that raised or broke the contract.
    """

    consequence: ClassVar[str]
    off: ClassVar[str] = ""
    back: ClassVar[str] = ""
    max_errors: ClassVar[int] = 0
    num_errors = _num_in_a_row = 0
    _is_closed = False

    @property
    def is_off(self) -> bool:
        """Whether the component is switched off for a while, or closed: only calls that are made in any case are made."""
        if self._meter.is_due:
            self._meter.switch_on()
            logger.warning("%s %s.", self.label, self.back)
        return self._meter.is_off or self._is_closed

    def _readiness(self, rule: Rule) -> Callable[[], bool] | None:
        return None if rule.always else lambda: not self.is_off

    def _further(self, rule: Rule) -> Call:
        check = super()._further(rule)

        def accepted(answer: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
            if check is not None:
                answer = check(answer, args, named)
            self._num_in_a_row = 0
            return True if rule.is_told else answer

        return accepted

    def _instead(self, rule: Rule, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        return False if rule.is_told else rule.otherwise

    def _failed(self, rule: Rule, error: BaseException, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        self.num_errors += 1
        self._num_in_a_row += 1
        said = f"{self.label} raised {as_words(error)} in {rule.method}(){self.consequence}"
        self._faults.say(f"{self.label}.{rule.method}", said, error=error)
        if self._num_in_a_row >= self.max_errors > 0:
            self._switch_off(f"raised {self.max_errors} times in a row")
        return self._instead(rule, args, named)

    def _note_slow(self, rule: Rule, took_s: float, num_budgets: float) -> None:
        if not rule.waits and (slow := self._meter.overran(rule.method, took_s, num_budgets=num_budgets)):
            self._switch_off(slow)

    def _switch_off(self, fault: str) -> None:
        if not self._meter.is_off:
            self._num_in_a_row = 0
            logger.error("%s %s%s", self.label, fault, self.off.format(how_long=self._meter.switch_off(fault)))


@functools.cache
def _maker(rule: Rule, *, can_rest: bool, looks_further: bool) -> Call:
    """Return what makes the function that calls a method by its rule."""
    ready = (
        f"\n        if not _is_ready():\n            return _guard._instead(_rule, {rule.packed})" if can_rest else ""
    )
    asked = ", ".join([repr(rule.method), "_answer", *(rule.law.reads if rule.law else ())])
    source = _MADE.format(
        method=rule.method,
        declared=rule.declared,
        passed=rule.passed,
        packed=rule.packed,
        readiness=ready,
        law=f"\n            _answer = _test({asked})" if rule.law else "",
        further=f"\n            _answer = _further(_answer, {rule.packed})" if looks_further else "",
    )
    names: dict[str, Any] = {"_test": rule.law and rule.law.test, "_reraise_interrupt": reraise_interrupt}
    exec(compile(source, f"<made by {__name__}>", "exec"), names)
    made: Call = names["make"]
    return made


def _is_default(component: object, contract: type, method: str) -> bool:
    """Return whether a component leaves a method as its contract defines it: then there is nothing to call or to guard."""
    own, default = getattr(type(component), method, None), getattr(contract, method)
    return own is default and method not in getattr(component, "__dict__", ())


def _is_undefined(guard: type, contract: type, method: str) -> bool:
    """Return whether the class of a guard leaves a method to what is made for it."""
    own = getattr(guard, method, None)
    return own is None or own is getattr(contract, method, None)


def _lacking(rule: Rule) -> Call:
    """Return what stands for a method that a component does not have."""
    return lambda *_, **__: rule.otherwise
