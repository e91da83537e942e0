"""Which components are switched off, for ``/ready`` and for the page of metrics."""

from __future__ import annotations

import math
from typing import Any

from trencadis.faults import num_switched_off, switched_off

__all__ = ["off_metrics", "off_table"]


def off_table() -> dict[str, Any]:
    """Return ``components``: of each that is off ``component``, ``cause`` and ``for_s``, None if it is not tried again."""
    rows = [
        {
            "component": one.component,
            "cause": one.cause,
            "for_s": None if math.isinf(one.for_s) else round(max(0.0, one.for_s), 1),
        }
        for one in switched_off()
    ]
    return {"components": rows}


def off_metrics() -> str:
    """Return the same in Prometheus' text format, with a count."""
    counter, gauge = "trencadis_components_switched_off_total", "trencadis_component_off"
    lines = [
        f"# HELP {counter} Components that were switched off, for a while or for good, since the start.",
        f"# TYPE {counter} counter",
        f"{counter} {num_switched_off()}",
        f"# HELP {gauge} 1: the component is switched off at the moment.",
        f"# TYPE {gauge} gauge",
        *(
            f'{gauge}{{component="{name}"}} 1'
            for name in dict.fromkeys(_escaped(one.component) for one in switched_off())
        ),
    ]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
