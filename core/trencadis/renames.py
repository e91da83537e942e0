"""Old names of members of contracts and records: accepted for one version, with a warning that names the new one."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["RenamedMembers", "old_names", "rename_field"]


class RenamedMembers:
    """Base of contracts with renamed members.

    A subclass that defines an old name and not the new one is bound to the new one; reading, calling and setting an old name,
    through ``super()`` too, acts on the new one. Each warns with a :class:`DeprecationWarning`.

    A contract states its renames as ``class Contract(RenamedMembers, renamed={"old": "new"})``.
    """

    _renamed: Mapping[str, str] = {}

    def __init_subclass__(cls, *, renamed: Mapping[str, str] | None = None, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if renamed is not None:
            cls._renamed = renamed
        for old, new in cls._renamed.items():
            if renamed is None:
                if old not in vars(cls) or new in vars(cls):
                    continue
                _warn(f"{cls.__qualname__}.{old}", new, stacklevel=3)
                setattr(cls, new, vars(cls)[old])
            _install(cls, old, new)


class _OldName:
    """Attribute that stands for another one of the same object."""

    def __init__(self, new: str) -> None:
        self._new = new

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner, self._old = owner, name

    def __get__(self, instance: Any, kind: type) -> Any:
        _warn(f"{kind.__qualname__}.{self._old}", self._new)
        nearer = kind.__mro__[: kind.__mro__.index(self._owner)]
        # A nearer class that has the old name would have been found first: it has called super().
        callers = [one for one in nearer if self._old in vars(one)]
        found = kind if instance is None else instance
        return getattr(super(callers[-1], found) if callers else found, self._new)

    def __set__(self, instance: Any, value: Any) -> None:
        _warn(f"{type(instance).__qualname__}.{self._old}", self._new)
        setattr(instance, self._new, value)


def rename_field(record: type, *, old: str, new: str) -> None:
    """Let an attrs class with keyword-only fields accept the old name of a field."""
    init: Callable[..., None] = record.__init__  # type: ignore[misc] # wrapped, not called on an instance of another class

    @functools.wraps(init)
    def renaming(self: Any, **given: Any) -> None:
        if old in given:
            _warn(f"{record.__qualname__}({old}=)", new)
            given[new] = given.pop(old)
        init(self, **given)

    record.__init__ = renaming  # type: ignore[misc]
    _install(record, old, new)


def old_names(module: str, names: Mapping[str, tuple[str, Any]]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module some of whose names were renamed: ``{old: (new, value)}``."""

    def found(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        new, value = names[name]
        _warn(f"{module}.{name}", new)
        return value

    return found


def _install(cls: type, old: str, new: str) -> None:
    stand_in = _OldName(new)
    stand_in.__set_name__(cls, old)
    setattr(cls, old, stand_in)


def _warn(what: str, new: str, *, stacklevel: int = 2) -> None:
    warnings.warn(
        f"{what} was renamed to {new}; the old name goes away with the next version.",
        DeprecationWarning,
        stacklevel + 1,
    )
