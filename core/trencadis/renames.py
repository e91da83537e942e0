"""Old names of members of contracts and records: accepted for two minor versions, with a warning that names the new one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from trencadis.deprecation import Deprecation, deprecate

__all__ = ["RenamedMembers", "old_names", "rename_field"]


class RenamedMembers:
    """Base of contracts with renamed members.

    A subclass that defines an old name and not the new one is bound to the new one; reading, calling and setting an old name,
    through ``super()`` too, acts on the new one. Each warns with a :class:`DeprecationWarning`.

    A contract states its renames as ``class Contract(RenamedMembers, renamed={"old": "new"}, since="0.1")``.
    """

    _renamed: Mapping[str, Deprecation] = {}

    def __init_subclass__(cls, *, renamed: Mapping[str, str] | None = None, since: str = "", **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if renamed is not None:
            cls._renamed = {old: _renaming(cls, old, new, since) for old, new in renamed.items()}
        for old, renaming in cls._renamed.items():
            if renamed is None:
                if old not in vars(cls) or renaming.use in vars(cls):
                    continue
                renaming.warn(what=f"{cls.__qualname__}.{old}", stacklevel=2)
                setattr(cls, renaming.use, vars(cls)[old])
            _install(cls, old, renaming)


class _OldName:
    """Attribute that stands for another one of the same object."""

    def __init__(self, renaming: Deprecation) -> None:
        self._renaming = renaming

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner, self._old = owner, name

    def __get__(self, instance: Any, kind: type) -> Any:
        self._renaming.warn(what=f"{kind.__qualname__}.{self._old}", stacklevel=2)
        nearer = kind.__mro__[: kind.__mro__.index(self._owner)]
        # A nearer class that has the old name would have been found first: it has called super().
        callers = [one for one in nearer if self._old in vars(one)]
        found = kind if instance is None else instance
        return getattr(super(callers[-1], found) if callers else found, self._renaming.use)

    def __set__(self, instance: Any, value: Any) -> None:
        self._renaming.warn(what=f"{type(instance).__qualname__}.{self._old}", stacklevel=2)
        setattr(instance, self._renaming.use, value)


def rename_field(record: type, *, old: str, new: str, since: str) -> None:
    """Let an attrs class with keyword-only fields accept the old name of a field."""
    init: Callable[..., None] = record.__init__  # type: ignore[misc] # wrapped, not called on an instance of another class
    renaming = _renaming(record, old, new, since)

    @functools.wraps(init)
    def accepting(self: Any, **given: Any) -> None:
        if old in given:
            renaming.warn(what=f"{record.__qualname__}({old}=)", stacklevel=2)
            given[new] = given.pop(old)
        init(self, **given)

    record.__init__ = accepting  # type: ignore[misc]
    _install(record, old, renaming)


def old_names(module: str, names: Mapping[str, tuple[str, Any]], *, since: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module some of whose names were renamed: ``{old: (new, value)}``."""
    renamings = {
        old: deprecate(f"{module}.{old}", use=new, module=module, since=since) for old, (new, _) in names.items()
    }

    def found(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        renamings[name].warn(stacklevel=2)
        return names[name][1]

    return found


def _renaming(owner: type, old: str, new: str, since: str) -> Deprecation:
    return deprecate(f"{owner.__qualname__}.{old}", use=new, module=owner.__module__, since=since)


def _install(cls: type, old: str, renaming: Deprecation) -> None:
    stand_in = _OldName(renaming)
    stand_in.__set_name__(cls, old)
    setattr(cls, old, stand_in)
