"""Fixtures for plugin authors; pytest finds them through the entry point ``trencadis`` of the group ``pytest11``.

pytest imports this module in every run on a machine that has Trencadís installed, so it imports nothing of it: each
fixture does, when a test asks for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from trencadis.clock import SimulatedClock
    from trencadis.registry import Registry
    from trencadis_testing.fakes import FakeBackend

__all__ = ["fake_backend", "simulated_clock", "trencadis_registry"]


@pytest.fixture
def simulated_clock() -> SimulatedClock:
    """A clock at 0 s that moves only when told to."""
    from trencadis.clock import SimulatedClock

    return SimulatedClock()


@pytest.fixture
def trencadis_registry() -> Registry:
    """A registry that discovered nothing: no installed plugin, not even a built-in one, can change the test."""
    from trencadis.registry import Registry

    return Registry.discover(entry_points=())


@pytest.fixture
def fake_backend() -> FakeBackend:
    """A backend without a model: its tokens are a known function of what it was given."""
    from trencadis_testing.fakes import FakeBackend

    return FakeBackend()
