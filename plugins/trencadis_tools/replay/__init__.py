"""Replays of flight records: the recorded steps again, with the same engine and the same plugins, on no device and in no time."""

from __future__ import annotations

from trencadis_tools.replay.exact import Difference, ReplayedSteps, replay_exactly
from trencadis_tools.replay.replayed_engine import check_replayable

__all__ = ["Difference", "ReplayedSteps", "check_replayable", "replay_exactly"]
