"""Config table of the strategy ``fitted``."""

from __future__ import annotations

import attrs
from attrs.validators import and_, ge, le

from trencadis_plugins.bucketing.workloads import DeviceCost

__all__ = ["FittedConfig"]


@attrs.frozen(kw_only=True)
class FittedConfig:
    """Table ``[bucketing.fitted]``: what the table is learnt from, and how large it may be.

    Limits hold together; 0 means no limit, and one of them is needed.
    """

    trace: str = attrs.field(
        default="", metadata={"help": "File to learn from: a trace or recorded shapes.", "unit": ""}
    )
    max_graphs: int = attrs.field(
        default=64, validator=ge(0), metadata={"help": "Most buckets of both phases; 0: no limit.", "unit": "buckets"}
    )
    max_compile_s: float = attrs.field(
        default=0.0,
        validator=ge(0),
        metadata={"help": "Longest estimated time to prepare the table; 0: no limit.", "unit": "s"},
    )
    max_graph_bytes: float = attrs.field(
        default=0.0,
        validator=ge(0),
        metadata={"help": "Most estimated memory of all graphs; 0: no limit.", "unit": "bytes"},
    )
    reserve_ratio: float = attrs.field(
        default=0.02,
        validator=and_(ge(0), le(1)),
        metadata={
            "help": "Weight of decode batches that the trace did not show, against those it did: loads change.",
            "unit": "",
        },
    )
    cost: DeviceCost = attrs.field(factory=DeviceCost)
