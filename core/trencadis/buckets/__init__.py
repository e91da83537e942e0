"""What bucket tables cost on a workload: traces, the shapes they cause, estimates, a picture. Pure but for reading files.

Serves the command ``trencadis buckets`` and strategies that learn, plugins included; knows no strategy by name.

    trace ▶ arrivals ▶ simulated steps ▶ Workload ─┬─ a strategy that learns ▶ table
    recorded shapes ───────────────────────────────┘└ strategy ▶ TableReport
"""

from __future__ import annotations

from trencadis.buckets.cost import DeviceCost
from trencadis.buckets.report import TableReport, measure
from trencadis.buckets.workload import Passes, Workload

__all__ = ["DeviceCost", "Passes", "TableReport", "Workload", "measure"]
