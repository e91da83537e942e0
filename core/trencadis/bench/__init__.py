"""Measurements that come with the engine."""

from __future__ import annotations

from trencadis.bench.eviction import EvictionResult, best_hit_ratio, measure_eviction
from trencadis.bench.schedule import ScheduleResult, ScheduleWorkload, measure_schedule
from trencadis.bench.speculation import (
    NO_DRAFTER,
    SpeculationResult,
    SpeculationWorkload,
    measure_speculation,
    read_prompts,
)
from trencadis.bench.throughput import ThroughputResult, ThroughputWorkload, measure_throughput

__all__ = [
    "NO_DRAFTER",
    "EvictionResult",
    "ScheduleResult",
    "ScheduleWorkload",
    "SpeculationResult",
    "SpeculationWorkload",
    "ThroughputResult",
    "ThroughputWorkload",
    "best_hit_ratio",
    "measure_eviction",
    "measure_schedule",
    "measure_speculation",
    "measure_throughput",
    "read_prompts",
]
