"""Replays of flight records with the same engine and plugins on a simulated device and clock."""

from __future__ import annotations

from trencadis_tools.replay.exact import Difference, ReplayedSteps, replay_exactly
from trencadis_tools.replay.replayed_engine import check_code, check_replayable, recorded_config
from trencadis_tools.replay.what_if import Served, recorded_latencies, recorded_step_times, replay_with

__all__ = [
    "Difference",
    "ReplayedSteps",
    "Served",
    "check_code",
    "check_replayable",
    "recorded_config",
    "recorded_latencies",
    "recorded_step_times",
    "replay_exactly",
    "replay_with",
]
