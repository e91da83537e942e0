"""How a field of a config class is declared, so that flags, ``--explain`` and the reference page know it."""

from __future__ import annotations

import inspect
from typing import Any

import attrs

from trencadis.deprecation import deprecate

__all__ = ["setting"]


def setting(
    default: Any,
    help: str,  # noqa: A002 - the name argparse and click use too
    *,
    unit: str = "",
    validator: Any = None,
    factory: Any = None,
    secret: bool = False,
    formerly: str = "",
    since: str = "",
    **more: Any,
) -> Any:
    """Return an attrs field with the metadata that flags, ``--explain`` and the reference page show. Pure.

    Args:
        default: Value if it is not set; ignored with ``factory``.
        help: One sentence: what it means.
        unit: Such as ``tokens`` or ``s``; empty for none.
        validator: An attrs validator.
        factory: Makes a mutable default.
        secret: The value is never printed.
        formerly: Key that it had before; accepted in files, environment and flags for two minor versions, with a warning.
        since: Version, ``major.minor``, of the package that renamed it; needed with ``formerly``.
        more: Further metadata, such as ``component="eviction"`` for a field that names another component.

    Raises:
        ValueError: There is a former key, and no version that renamed it.
    """
    if formerly and not since:
        raise ValueError(f"formerly={formerly!r} needs since=, the version that renamed the key")
    if formerly:
        # The class that the field belongs to does not exist yet, but the caller is in its module.
        caller = getattr(inspect.currentframe(), "f_back", None)
        module = caller.f_globals["__name__"] if caller else ""
        more["renaming"] = deprecate(f"the key {formerly}", use="its new name", module=module, since=since)
    metadata = {"help": help, "unit": unit, "secret": secret, "formerly": formerly, **more}
    if factory is not None:
        return attrs.field(factory=factory, validator=validator, metadata=metadata)
    return attrs.field(default=default, validator=validator, metadata=metadata)
