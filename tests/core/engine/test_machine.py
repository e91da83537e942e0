"""Engines of generated configurations in any order of events: no text is wrong, nobody is lost, nothing is left."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings

from support.machine.history import History

TestHistory = History.TestCase
TestHistory.settings = settings(
    max_examples=2000,
    stateful_step_count=20,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    print_blob=False,
)
