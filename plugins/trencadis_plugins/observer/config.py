"""Config tables of the built-in observers."""

from __future__ import annotations

import attrs
from attrs.validators import gt

__all__ = ["LogObserverConfig"]


@attrs.frozen(kw_only=True)
class LogObserverConfig:
    """Table ``[observer.log]``: how often a line is written."""

    interval_s: float = attrs.field(
        default=5.0, validator=gt(0), metadata={"help": "Shortest time between two lines, engine clock.", "unit": "s"}
    )
