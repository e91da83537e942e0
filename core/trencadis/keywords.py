"""An unknown keyword of a record that clients fill in: an error that says which one is meant."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import attrs

from trencadis.errors import InvalidRequestError, did_you_mean

__all__ = ["suggesting"]

_T = TypeVar("_T")


def suggesting(record: type[_T]) -> type[_T]:
    """Return an attrs class with keyword-only fields that refuses an unknown keyword with a suggestion."""
    init: Callable[..., None] = record.__init__
    names = [field.name for field in attrs.fields(record)]  # type: ignore[arg-type] # any attrs class

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **given: Any) -> None:
        try:
            init(self, *args, **given)
        except TypeError:
            unknown = next((name for name in given if name not in names), "")
            if not unknown:
                raise
            raise _unknown(record.__name__, unknown, names) from None

    record.__init__ = checked  # type: ignore[method-assign]
    return record


def _unknown(record: str, unknown: str, names: list[str]) -> InvalidRequestError:
    from trencadis.other_engines import parameters

    other = parameters().get(unknown, "")
    meant = f' Did you mean "{other}"?' if other in names else did_you_mean(unknown, names)
    return InvalidRequestError(
        f"{record}({unknown}=...): there is no such parameter.{meant or ' There are: ' + ', '.join(names) + '.'}",
        field=unknown,
    )
