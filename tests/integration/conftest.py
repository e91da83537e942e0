"""Whole engines and servers take long: of each test's parameter sets, two are in the default tier."""

from __future__ import annotations

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark each test that says nothing else for two representatives."""
    if not item.get_closest_marker("representatives"):
        item.add_marker(pytest.mark.representatives(2))
