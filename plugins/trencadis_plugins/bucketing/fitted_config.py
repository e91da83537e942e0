"""Config table of the strategy ``fitted``."""

from __future__ import annotations

import attrs
from attrs.validators import and_, ge, le

from trencadis.interfaces import setting
from trencadis_plugins.bucketing.workloads import DeviceCost

__all__ = ["FittedConfig"]


@attrs.frozen(kw_only=True)
class FittedConfig:
    """Table ``[bucketing.fitted]``: what the table is learnt from, and how large it may be.

    Limits hold together; 0 means no limit, and one of them is needed.
    """

    trace: str = setting("", "File to learn from: a trace or recorded shapes.")
    max_graphs: int = setting(64, "Most buckets of both phases; 0: no limit.", unit="buckets", validator=ge(0))
    max_compile_s: float = setting(
        0.0, "Longest estimated time to prepare the table; 0: no limit.", unit="s", validator=ge(0)
    )
    max_graph_bytes: float = setting(
        0.0, "Most estimated memory of all graphs; 0: no limit.", unit="bytes", validator=ge(0)
    )
    reserve_ratio: float = setting(
        0.02,
        "Weight of decode batches that the trace did not show, against those it did: loads change.",
        validator=and_(ge(0), le(1)),
    )
    cost: DeviceCost = attrs.field(factory=DeviceCost)
