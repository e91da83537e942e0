"""Workloads for strategies that learn: traces, the shapes that they cause, and costs on a device. Pure but for reading files.

trace ▶ arrivals ▶ simulated steps ▶ Workload ─┬─ a strategy that learns ▶ table
recorded shapes ───────────────────────────────┘
"""

from __future__ import annotations

from trencadis_gallery.bucketing.workloads.cost import DeviceCost
from trencadis_gallery.bucketing.workloads.workload import Passes, Workload

__all__ = ["DeviceCost", "Passes", "Workload"]
