"""Workloads: which requests come when, read from traces or drawn."""

from __future__ import annotations

from trencadis_tools.workloads.prompts import NUM_RESERVED_TOKENS, Prompts
from trencadis_tools.workloads.workload import Workload, WorkloadRequest

__all__ = ["NUM_RESERVED_TOKENS", "Prompts", "Workload", "WorkloadRequest"]
