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
from collections.abc import Callable, Mapping
from itertools import islice
from operator import attrgetter
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

Arguments = tuple[Any, ...]
Named = Mapping[str, Any]
Check = Callable[[Any, Arguments, Named], Any]

_MAX_REFUSAL: Final = 1000
_MAX_ANSWERS: Final = 65_536
_ANY: Final = inspect.Parameter("any", inspect.Parameter.POSITIONAL_ONLY)


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


@attrs.frozen(kw_only=True)
class Rule:
    """How a method of a contract is called.

    Attributes:
        method: Name of the method.
        law: Law of its answer; None: any answer is right.
        check_of: Returns the law for a component: called with an answer, the arguments and the keyword arguments. None: there is no law.
        is_told: There is no answer: a component that takes over is not told again.
        opens: The first call of a step, before which a component that rested is tried again.
        always: It is called also while the component is switched off.
        waits: It may take its time.
        calls_others: The default calls other methods of the component, so it is guarded like one of its own.
        num_budgets: Budgets of time that a call may take, by its arguments; at least 1.
        otherwise: The answer where none can be asked for.
    """

    method: str
    law: Law | None = None
    check_of: Callable[[object], Check] | None = None
    is_told: bool = False
    opens: bool = False
    always: bool = False
    waits: bool = False
    calls_others: bool = False
    num_budgets: Callable[[Arguments, Named], float] = lambda _, __: 1.0
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
        if scales_with:
            sized = _reader(method, scales_with)
            options["num_budgets"] = lambda args, named: max(1.0, len(sized(args, named)) / each)
        if made is not None:
            options.update(law=made, check_of=_check_of(method, made))
        method.__rule__ = Rule(method=method.__name__, **options)  # type: ignore[attr-defined] # functions take attributes
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
    return answer if rule.check_of is None else rule.check_of(by)(answer, args, named)


def _check_of(method: Callable[..., Any], made: Law) -> Callable[[object], Check]:
    """Return what makes the law for a component. It is called thousands of times a second, so the commonest forms are spelled out."""
    name, test, parameters = method.__name__, made.test, inspect.signature(method).parameters
    has_keywords = all(parameters.get(path, _ANY).kind is inspect.Parameter.KEYWORD_ONLY for path in made.reads)
    own = [path.removeprefix("self.") if path.startswith("self.") else "" for path in made.reads]
    reads = [_nothing if field else _reader(method, path) for path, field in zip(made.reads, own, strict=True)]
    both = list(zip(own, reads, strict=True))

    def check_of(component: object) -> Check:
        return lambda answer, args, named: test(
            name, answer, *[getattr(component, field) if field else read(args, named) for field, read in both]
        )

    match made.reads:
        case (one,) if has_keywords:
            return _always(lambda answer, _, named: test(name, answer, named[one]))
        case (one, other) if has_keywords:
            return _always(lambda answer, _, named: test(name, answer, named[one], named[other]))
        case (_,) if not own[0]:
            (only,) = reads
            return _always(lambda answer, args, named: test(name, answer, only(args, named)))
    return check_of


def _always(check: Check) -> Callable[[object], Check]:
    return lambda _: check


def _nothing(args: Arguments, named: Named) -> None:
    """Read nothing: the law asks the component."""


def _reader(method: Callable[..., Any], path: str) -> Callable[[Arguments, Named], Any]:
    """Return what finds an argument, or a field of one, among the arguments of a call."""
    name, _, field = path.partition(".")
    place = list(inspect.signature(method).parameters).index(name) - 1
    if not field:
        return lambda args, named: args[place] if place < len(args) else named[name]
    part = attrgetter(field)
    return lambda args, named: part(args[place] if place < len(args) else named[name])


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
