"""Mark of policy classes whose state is plain data, which a flight record can copy and a replay restore."""

from __future__ import annotations

from typing import TypeVar

__all__ = ["has_plain_state", "plain_state"]

_T = TypeVar("_T")
_MARK = "_class_with_plain_state"


def plain_state(cls: type[_T]) -> type[_T]:
    """Declare that everything that objects of a class remember can be copied, and that none of it is text or a token id.

    What they remember are their attributes: numbers, strings, numpy arrays, random generators, and lists, tuples, sets, deques and
    dictionaries of these; and objects with such attributes, one to an attribute. Functions, classes and attrs objects, as
    configurations are, are taken to be the same in every object. ``bytes`` are compared only: in a replay others stand for them.

    A decorator for scheduling and eviction policies. Without it a flight record of a run with this policy can be replayed only from
    the start of the engine. A class that inherits from such a one has to declare it itself.
    """
    setattr(cls, _MARK, cls)
    return cls


def has_plain_state(cls: type[object]) -> bool:
    """Return whether a class declares it, itself. Pure."""
    return getattr(cls, _MARK, None) is cls
