"""Workloads: which requests come when, read from traces or drawn."""

from __future__ import annotations

from trencadis_tools.workloads.workload import Workload, WorkloadRequest

__all__ = ["Workload", "WorkloadRequest"]
