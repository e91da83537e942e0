"""Bucket tables on a workload: size, cost and plot."""

from __future__ import annotations

from trencadis_tools.buckets.report import TableReport, measure

__all__ = ["TableReport", "measure"]
