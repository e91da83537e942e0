"""Workloads: requests with arrival times, read from traces or drawn."""

from __future__ import annotations

from trencadis_tools.workloads.arrivals import Arrivals
from trencadis_tools.workloads.distributions import Distribution
from trencadis_tools.workloads.prompts import Prompts
from trencadis_tools.workloads.recipe import Lengths, Recipe
from trencadis_tools.workloads.sessions import Sessions
from trencadis_tools.workloads.summary import Summary, summarise
from trencadis_tools.workloads.terms import Prefixes, Priorities, Targets, Tenants
from trencadis_tools.workloads.traces import TraceSource
from trencadis_tools.workloads.workload import Workload, WorkloadRequest
from trencadis_tools.workloads.workload_file import builtin_names, depends_on_seed, load_workload, trace_file
from trencadis_tools.workloads.written import write_workload

__all__ = [
    "Arrivals",
    "Distribution",
    "Lengths",
    "Prefixes",
    "Priorities",
    "Prompts",
    "Recipe",
    "Sessions",
    "Summary",
    "Targets",
    "Tenants",
    "TraceSource",
    "Workload",
    "WorkloadRequest",
    "builtin_names",
    "depends_on_seed",
    "load_workload",
    "summarise",
    "trace_file",
    "write_workload",
]
