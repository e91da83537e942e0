"""Laws of answers: each stands beside the method of a contract that it is a law of.

    class SchedulingPolicy(ABC):
        @law(at_most("num_remaining", "token_budget"))
        def chunk(self, view, *, slot, num_remaining, token_budget): ...

The engine's guard holds every answer to its law, the conformance kit asks :func:`legal`, and documentation shows :attr:`Law.text`.
A law names what it reads by the parameters of the method: ``"token_budget"``, or ``"view.waiting"`` for a field of one;
``"self.lossless"`` is what the component says of itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import islice
from typing import Any, Final, TypeVar

import attrs
import numpy as np

from trencadis.errors import ContractError
from trencadis.faults import shown

__all__ = [
    "Law",
    "Rule",
    "all_of",
    "at_least",
    "at_most",
    "law",
    "legal",
    "of_type",
    "one_of",
    "one_of_words",
    "permutation_of",
    "readable",
    "rules_of",
    "tell",
    "tell_always",
]

M = TypeVar("M", bound=Callable[..., Any])

_MAX_REFUSAL: Final = 1000
_MAX_ANSWERS: Final = 65_536


@attrs.frozen
class Law:
    """What an answer must be.

    Attributes:
        text: Completes the sentence "The answer must be …".
        test: Called with the name of the method, an answer and the values of ``reads``; returns the answer in the type that the engine
            reckons with, and raises :class:`ContractError` for one that is against the law.
        reads: Arguments of the method, or fields of them, or of the component.
    """

    text: str
    test: Callable[..., Any]
    reads: tuple[str, ...] = ()


@attrs.frozen(kw_only=True, eq=False)
class Rule:
    """How a method of a contract is called.

    Attributes:
        method: Name of the method.
        law: Law of its answer; None: any answer is right.
        declared: Arguments as Python declares them; for functions that are made from the contract.
        passed: Arguments as they are passed on.
        packed: Arguments as a tuple and a table.
        check: Called with a component, its answer and the arguments, returns what the law's test does; None: there is no law.
        is_told: There is no answer: a component that takes over is not told again.
        opens: The first call of a step, before which a component that rested is tried again.
        always: It is called also while the component is switched off.
        waits: It may take its time.
        calls_others: The default calls other methods of the component, so it is guarded like one of its own.
        num_budgets: Called with the arguments, returns the budgets of time that a call may take, at least 1.
        otherwise: The answer where none can be asked for.
    """

    method: str
    law: Law | None = None
    declared: str = ""
    passed: str = ""
    packed: str = "(), {}"
    check: Callable[..., Any] | None = None
    is_told: bool = False
    opens: bool = False
    always: bool = False
    waits: bool = False
    calls_others: bool = False
    num_budgets: Callable[..., float] = lambda *_, **__: 1.0
    otherwise: Any = None


def law(made: Law | None = None, *, scales_with: str = "", each: int = 1, **options: Any) -> Callable[[M], M]:
    """Declare what the answers of a method must be.

    Args:
        made: The law; None: any answer is right, but exceptions are contained.
        scales_with: Argument whose length the time of a call may grow with; empty: none.
        each: Items of that argument for each budget of time.
        options: Other attributes of :class:`Rule`.
    """

    def declare(method: M) -> M:
        name, (declared, passed, packed) = method.__name__, _spelled(method)
        if scales_with:
            options["num_budgets"] = eval(f"lambda {declared}: max(1.0, len({scales_with}) / {each})")
        if made is not None:  # spelled out, since a guard asks it thousands of times a second
            asked = f"test({', '.join([repr(name), 'answer', *made.reads])})"
            options["check"] = eval(f"lambda self, answer, {declared}: {asked}", {"test": made.test})
        method.__rule__ = Rule(  # type: ignore[attr-defined] # functions take attributes
            method=name, law=made, declared=declared, passed=passed, packed=packed, **options
        )
        return method

    return declare


def tell(method: M) -> M:
    """Declare that a method is told something and does not answer."""
    return law(is_told=True)(method)


def tell_always(method: M) -> M:
    """Declare the same of what must be told in any case, since something has to be released."""
    return law(is_told=True, always=True)(method)


def rules_of(contract: type) -> dict[str, Rule]:
    """Return the rules of all methods that a contract declares, by name."""
    found = {name: getattr(getattr(contract, name), "__rule__", None) for name in dir(contract)}
    return {name: rule for name, rule in found.items() if isinstance(rule, Rule)}


def legal(method: Callable[..., Any], answer: Any, *args: Any, by: object = None, **named: Any) -> Any:
    """Return an answer if it is legal.

    Args:
        method: A method of a contract, such as ``SchedulingPolicy.chunk``.
        answer: Answer of a component.
        args: The arguments of the call, without the component.
        by: The component, where the law asks what it says of itself.
        named: Keyword arguments of the call.

    Raises:
        ContractError: It is against the law.
    """
    rule: Rule = method.__rule__  # type: ignore[attr-defined] # of a method with a law
    return answer if rule.check is None else rule.check(by, answer, *args, **named)


def _spelled(method: Callable[..., Any]) -> tuple[str, str, str]:
    """Return the arguments of a method as they are declared, as they are passed on, and as a tuple and a table."""
    given = list(inspect.signature(method).parameters.values())[1:]
    plain = [one.name for one in given if one.kind is not inspect.Parameter.KEYWORD_ONLY]
    named = [one.name for one in given if one.kind is inspect.Parameter.KEYWORD_ONLY]
    declared = ", ".join([*plain, *(["*"] if named else []), *named])
    passed = ", ".join([*plain, *[f"{one}={one}" for one in named]])
    table = ", ".join(f"{one!r}: {one}" for one in named)
    return declared, passed, f"({''.join(f'{one}, ' for one in plain)}), {{{table}}}"


# ------------------------------------------------------------------------------------------------------------ numbers


def at_most(*limits: str) -> Law:
    """A whole number from 0 to the least of some arguments."""
    text = f"``{limits[0]}``" if len(limits) == 1 else f"the least of {', '.join(f'``{one}``' for one in limits)}"
    return Law(f"from 0 to {text}", _at_most, limits)


def _at_most(method: str, answer: Any, *limits: int) -> int:
    most = min(limits)
    if 0 <= answer <= most:
        return int(answer)
    raise ContractError(f"{method}() returned {shown(answer)}, allowed are 0 to {most}")


def at_least(least: int) -> Law:
    """A whole number from ``least`` on."""

    def test(method: str, answer: Any) -> int:
        if isinstance(answer, int) and not isinstance(answer, bool) and answer >= least:
            return answer
        raise ContractError(f"{method}() returned {shown(answer)}, no whole number from {least} on")

    return Law(f"a whole number from {least} on", test)


def one_of(candidates: str, *, or_none: bool = False) -> Law:
    """One of the items of an argument, or -1 for none of them."""

    def test(method: str, answer: Any, known: Any) -> int:
        if answer in known or (or_none and answer == -1):
            return int(answer)
        nor = " and not -1" if or_none else ""
        raise ContractError(f"{method}() returned {shown(answer)}, no candidate of {shown(known)}{nor}")

    return Law(f"one of ``{candidates}``{', or -1' if or_none else ''}", test, (candidates,))


def permutation_of(items: str) -> Law:
    """All items of an argument, in any order."""
    return Law(f"a permutation of ``{items}``", _permutation_of, (items,))


def _permutation_of(method: str, answer: Any, items: Any) -> Any:
    if answer is items:
        return items
    if (
        len(answer) == len(items)
        and (order := np.asarray(answer)).dtype.kind in "iu"
        and np.array_equal(np.sort(order), np.sort(items))
    ):
        return order
    raise ContractError(f"{method}() returned {shown(answer)}, no permutation of {shown(items)}")


# --------------------------------------------------------------------------------------------------------- other types


def of_type(kind: Any) -> Law:
    """An answer of some type."""
    return Law(f"``{getattr(kind, '__name__', kind)}``", lambda _, answer: _of_type(answer, kind))


def all_of(kind: type) -> Law:
    """Any number of answers of a type, of which the first 65,536 count."""
    return Law(
        f"``{kind.__name__}``, any number of them",
        lambda _, answers: tuple([_of_type(answer, kind) for answer in islice(answers, _MAX_ANSWERS)]),
    )


def _of_type(answer: Any, kind: Any) -> Any:
    if not isinstance(answer, kind):
        raise ContractError(f"it returned {shown(answer)}, where {getattr(kind, '__name__', kind)} is expected")
    return answer


def one_of_words(*words: str) -> Law:
    """One of some words."""
    said = " and ".join(f'"{word}"' for word in words)

    def test(method: str, answer: Any) -> str:
        if isinstance(answer, str) and answer in words:
            return answer
        raise ContractError(f"{method} returned {shown(answer)}; {said} are allowed.")

    return Law(" or ".join(f"``{word}``" for word in words), test)


def readable() -> Law:
    """Text for a client: some printable characters, or none."""
    return Law(f"text of at most {_MAX_REFUSAL:,} printable characters", _readable)


def _readable(method: str, answer: Any) -> str:
    if not isinstance(answer, str):
        raise ContractError(f"{method}() returned {shown(answer)}, which is no text")
    if len(answer) > _MAX_REFUSAL or not answer.isprintable():
        raise ContractError(f"{method}() returned {shown(answer)}: no more than {_MAX_REFUSAL} printable characters")
    return answer
