"""A kind of component, as a plugin offers it: its table, the hook for its components, and the contract that they fulfil."""

from __future__ import annotations

import sys
from typing import Any

import attrs

from trencadis.interfaces.component import Stability

__all__ = ["Noun"]


def _check_name(_: object, __: attrs.Attribute[str], name: str) -> None:
    if not name.isidentifier() or name != name.lower():
        raise ValueError(f"noun {name!r} must be lower-case letters, digits and underscores")


@attrs.frozen(kw_only=True)
class Noun:
    """A kind of component. ``[name]`` chooses one, and each has a table ``[name.COMPONENT]``.

    Attributes:
        name: Lower-case, with underscores; no table of the core, and unique.
        hook: Name of the hook by which plugins yield components of it.
        contract: Class of what a factory returns; its module has ``INTERFACE_VERSION`` and ``STABILITY``.
        default: Component that a configuration means that says nothing.
        helps: Noun that has to have a component, or those of this one have nothing to do and are not chosen; empty: none.
        suite: Import path of the conformance suite, ``package.module:Class``, for ``pytest --trencadis-conform``; empty: there is none.
        has_none: Whether a component may be called ``none``: else that name stands for no component.
    """

    name: str = attrs.field(validator=_check_name)
    hook: str
    contract: type[Any]
    default: str = "none"
    helps: str = ""
    suite: str = ""
    has_none: bool = False

    @property
    def interface_version(self) -> int:
        """Current version of the contract, 1 or more."""
        return int(sys.modules[self.contract.__module__].INTERFACE_VERSION)

    @property
    def stability(self) -> Stability:
        """How far plugin authors can rely on the contract."""
        stability: Stability = sys.modules[self.contract.__module__].STABILITY
        return stability
