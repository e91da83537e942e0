"""Bucket tables on a workload: their size, their cost, a picture."""

from __future__ import annotations

from trencadis_tools.buckets.report import TableReport, measure

__all__ = ["TableReport", "measure"]
