"""Config table of the acceptance rule ``typical``."""

from __future__ import annotations

import attrs
from attrs.validators import and_, gt, lt

from trencadis.interfaces import setting

__all__ = ["TypicalConfig"]


@attrs.frozen(kw_only=True)
class TypicalConfig:
    """Table ``[acceptance.typical]``.

    Attributes:
        epsilon: A draft that the model gives more than this always stands, 0 .. 1.
        delta: The threshold is this times exp(-entropy) where that is lower.
    """

    epsilon: float = setting(
        0.09, "A draft that the model gives more than this probability always stands.", validator=and_(gt(0.0), lt(1.0))
    )
    delta: float = setting(
        0.3,
        "Where it is lower, the threshold is this times exp(-entropy of the model's distribution).",
        validator=gt(0.0),
    )
