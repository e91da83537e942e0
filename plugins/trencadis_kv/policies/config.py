"""Config tables of the built-in KV policies."""

from __future__ import annotations

import attrs
from attrs.validators import and_, gt, le

from trencadis.interfaces import setting

__all__ = ["CostAwareConfig"]


@attrs.frozen(kw_only=True)
class CostAwareConfig:
    """Table ``[kv_policy.cost_aware]``.

    Attributes:
        max_load_fraction: Longest time of a load, as a fraction of the time to compute the same tokens.
        max_staged_fraction: Fraction of the staging memory in use above which nothing more is saved.
    """

    max_load_fraction: float = setting(
        0.8,
        "A load may take this share of the time to compute the same tokens.",
        unit="ratio",
        validator=and_(gt(0), le(1)),
    )
    max_staged_fraction: float = setting(
        0.9,
        "With a larger share of the staging memory in use, nothing more is saved.",
        unit="ratio",
        validator=and_(gt(0), le(1)),
    )
