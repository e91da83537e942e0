"""Configurations on the same requests: runs, intervals, verdicts, reports and records."""

from __future__ import annotations

from trencadis_tools.compare.comparison import Arguments, Comparison, compare
from trencadis_tools.compare.judge import Effect, Judgement, Outcome, judge
from trencadis_tools.compare.metrics import Metric, metric_of
from trencadis_tools.compare.statistics import Interval, block_interval, confidence_sequence, holm, run_interval
from trencadis_tools.compare.steady_state import Backlog, backlog_of, warm_up_cut

__all__ = [
    "Arguments",
    "Backlog",
    "Comparison",
    "Effect",
    "Interval",
    "Judgement",
    "Metric",
    "Outcome",
    "backlog_of",
    "block_interval",
    "compare",
    "confidence_sequence",
    "holm",
    "judge",
    "metric_of",
    "run_interval",
    "warm_up_cut",
]
