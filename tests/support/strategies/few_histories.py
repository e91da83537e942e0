"""A pytest plugin for processes that tests start: as few random histories for a scheduling policy as this tree's own policies get."""

from __future__ import annotations


def pytest_sessionstart() -> None:
    from trencadis_testing import SchedulingConformance

    SchedulingConformance.num_histories, SchedulingConformance.num_rules = 8, 25
