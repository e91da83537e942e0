"""Measurements that come with the engine."""

from __future__ import annotations

from trencadis_tools.bench.eviction import EvictionResult, best_hit_ratio, measure_eviction
from trencadis_tools.bench.kv import NO_CONNECTOR, KVResult, KVWorkload, measure_kv
from trencadis_tools.bench.schedule import ScheduleResult, ScheduleWorkload, measure_schedule
from trencadis_tools.bench.speculation import (
    NO_DRAFTER,
    SpeculationResult,
    SpeculationWorkload,
    measure_speculation,
    read_prompts,
)
from trencadis_tools.bench.throughput import ThroughputResult, ThroughputWorkload, measure_throughput

__all__ = [
    "NO_CONNECTOR",
    "NO_DRAFTER",
    "EvictionResult",
    "KVResult",
    "KVWorkload",
    "ScheduleResult",
    "ScheduleWorkload",
    "SpeculationResult",
    "SpeculationWorkload",
    "ThroughputResult",
    "ThroughputWorkload",
    "best_hit_ratio",
    "measure_eviction",
    "measure_kv",
    "measure_schedule",
    "measure_speculation",
    "measure_throughput",
    "read_prompts",
]
