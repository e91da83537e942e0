"""Deprecations: what goes away, in which version, and what to use instead. Every use warns, for two minor versions at least."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import attrs

__all__ = ["Deprecation", "deprecate", "deprecated", "removals_due"]

T = TypeVar("T", bound=Callable[..., Any])

NUM_MINORS = 2
"""Minor versions between the one that deprecates something and the one that may remove it."""


def _minor_of(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


@attrs.frozen(kw_only=True)
class Deprecation:
    """One thing that goes away.

    Attributes:
        what: What is deprecated, as its users write it.
        use: What to use instead.
        module: Where it is declared.
        since: Version, ``major.minor``, of the package that declares it: the first in which every use warns.
        removed_in: First version without it; empty: two minor versions after ``since``, and no earlier one is accepted.
    """

    what: str
    use: str
    module: str
    since: str
    removed_in: str = attrs.field()

    @removed_in.default
    def _two_minors_later(self) -> str:
        major, minor = _minor_of(self.since)
        return f"{major}.{minor + NUM_MINORS}"

    @removed_in.validator
    def _check(self, _: object, removed_in: str) -> None:
        major, minor = _minor_of(self.since)
        if _minor_of(removed_in) < (major, minor + NUM_MINORS):
            raise ValueError(
                f"{self.what}: deprecated since {self.since}, it cannot be removed in {removed_in}: "
                f"{major}.{minor + NUM_MINORS} is the first version that may."
            )

    def __str__(self) -> str:
        """Return the warning."""
        return f"{self.what} is deprecated since {self.since}: use {self.use}; it goes away with {self.removed_in}."

    def warn(self, *, what: str = "", stacklevel: int = 1) -> None:
        """Warn of a use.

        Args:
            what: What was used, where that says more than the declaration, such as a member of a subclass.
            stacklevel: 1: the caller of this method is to blame; 2: its caller.
        """
        shown = attrs.evolve(self, what=what) if what else self
        warnings.warn(str(shown), DeprecationWarning, stacklevel + 1)


_declared: list[Deprecation] = []


def deprecate(what: str, *, use: str, module: str, since: str, removed_in: str = "") -> Deprecation:
    """Declare a deprecation and return it; code that is used in the old way calls its :meth:`~Deprecation.warn`.

    Args:
        what: See :class:`Deprecation`, as the others.
        use: See there.
        module: See there.
        since: See there.
        removed_in: See there.

    Raises:
        ValueError: It would be removed less than two minor versions later.
    """
    given = {"removed_in": removed_in} if removed_in else {}
    found = Deprecation(what=what, use=use, module=module, since=since, **given)
    _declared.append(found)
    return found


def deprecated(*, since: str, use: str, removed_in: str = "") -> Callable[[T], T]:
    """Return a decorator for functions, methods and classes that go away: each call warns.

    Args:
        since: Version of the package that declares it, ``major.minor``.
        use: What to call instead.
        removed_in: First version without it; empty: two minor versions after ``since``.

    Raises:
        ValueError: It would be removed less than two minor versions later.
    """

    def mark(target: T) -> T:
        found = deprecate(target.__qualname__, use=use, module=target.__module__, since=since, removed_in=removed_in)
        called: Any = target.__init__ if isinstance(target, type) else target  # type: ignore[misc] # wrapped, not called

        @functools.wraps(called)
        def warning(*args: Any, **kwargs: Any) -> Any:
            found.warn(stacklevel=2)
            return called(*args, **kwargs)

        if not isinstance(target, type):
            return warning  # type: ignore[return-value] # the same parameters and result
        target.__init__ = warning  # type: ignore[misc]
        return target

    return mark


def removals_due(version: str, package: str) -> list[Deprecation]:
    """Return what a version has to be released without, of the modules that have been imported, by module and name.

    Args:
        version: The version to be released.
        package: Package that declares them, or the beginning of the names of several.
    """
    due = [
        one for one in _declared if one.module.startswith(package) and _minor_of(one.removed_in) <= _minor_of(version)
    ]
    return sorted(due, key=lambda one: (one.module, one.what))
