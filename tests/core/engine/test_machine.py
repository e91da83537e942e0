"""Engines of generated configurations in any order of events: no text is wrong, nobody is lost, nothing is left."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings

from support.machine.history import History

ONCE = settings(
    max_examples=1200,
    stateful_step_count=20,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    print_blob=False,
)
TestHistory = History.TestCase
TestHistory.settings = ONCE
"""Of its examples `.ci/run` has a quarter, the same in every run: about a minute of CPU time."""


class LongHistory(History):
    """More of them, longer ones, and others each time."""


TestLongHistory = pytest.mark.nightly(LongHistory.TestCase)
TestLongHistory.settings = settings(ONCE, max_examples=4000, stateful_step_count=40, derandomize=False)
