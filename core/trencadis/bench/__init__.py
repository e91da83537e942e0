"""Measurements that come with the engine."""

from __future__ import annotations

from trencadis.bench.throughput import ThroughputResult, ThroughputWorkload, measure_throughput

__all__ = ["ThroughputResult", "ThroughputWorkload", "measure_throughput"]
