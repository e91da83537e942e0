"""Config tables of the built-in observers."""

from __future__ import annotations

import attrs
from attrs.validators import gt

__all__ = ["LogObserverConfig", "PrometheusObserverConfig"]


@attrs.frozen(kw_only=True)
class LogObserverConfig:
    """Table ``[observer.log]``: how often a line is written."""

    interval_s: float = attrs.field(
        default=5.0,
        validator=gt(0),
        metadata={
            "help": "Shortest time between two lines, engine clock.",
            "unit": "s",
        },
    )


@attrs.frozen(kw_only=True)
class PrometheusObserverConfig:
    """Table ``[observer.prometheus]``: how the metrics are labelled."""

    model_name: str = attrs.field(
        default="",
        metadata={
            "help": "Label model_name of the metrics under vLLM's names; the server fills in the name it serves."
        },
    )
    vllm_names: bool = attrs.field(
        default=True, metadata={"help": "Show the metrics under vLLM's names as well, for dashboards made for it."}
    )
