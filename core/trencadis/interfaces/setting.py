"""How a field of a config class is declared, so that flags, ``--explain`` and the reference page know it."""

from __future__ import annotations

from typing import Any

import attrs

__all__ = ["setting"]


def setting(
    default: Any,
    help: str,  # noqa: A002 - the name argparse and click use too
    *,
    unit: str = "",
    validator: Any = None,
    factory: Any = None,
    secret: bool = False,
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
        more: Further metadata, such as ``component="eviction"`` for a field that names another component.
    """
    metadata = {"help": help, "unit": unit, "secret": secret, **more}
    if factory is not None:
        return attrs.field(factory=factory, validator=validator, metadata=metadata)
    return attrs.field(default=default, validator=validator, metadata=metadata)
