"""Config tables of the built-in observers."""

from __future__ import annotations

import attrs
from attrs.validators import gt

from trencadis.interfaces import setting

__all__ = ["LogObserverConfig", "PrometheusObserverConfig", "RecorderObserverConfig"]


@attrs.frozen(kw_only=True)
class LogObserverConfig:
    """Table ``[observer.log]``: how often a line is written."""

    interval_s: float = setting(5.0, "Shortest time between two lines, engine clock.", unit="s", validator=gt(0))


@attrs.frozen(kw_only=True)
class PrometheusObserverConfig:
    """Table ``[observer.prometheus]``: how the metrics are labelled."""

    model_name: str = setting(
        "", "Label model_name of the metrics under vLLM's names; the server fills in the name it serves."
    )
    vllm_names: bool = setting(True, "Show the metrics under vLLM's names as well, for dashboards made for it.")


@attrs.frozen(kw_only=True)
class RecorderObserverConfig:
    """Table ``[observer.recorder]``: where sizes and times of steps are written."""

    file: str = setting(
        "steps.jsonl",
        "File of JSON lines, written anew; its directory exists. With several replicas each adds its index: steps.1.jsonl.",
    )
