"""Workloads: which requests come when, read from traces or drawn."""

from __future__ import annotations

from trencadis_tools.workloads.prompts import NUM_RESERVED_TOKENS, Prompts
from trencadis_tools.workloads.summary import Summary, summarise
from trencadis_tools.workloads.workload import Workload, WorkloadRequest
from trencadis_tools.workloads.workload_file import builtin_names, load_workload, trace_file
from trencadis_tools.workloads.written import write_workload

__all__ = [
    "NUM_RESERVED_TOKENS",
    "Prompts",
    "Summary",
    "Workload",
    "WorkloadRequest",
    "builtin_names",
    "load_workload",
    "summarise",
    "trace_file",
    "write_workload",
]
