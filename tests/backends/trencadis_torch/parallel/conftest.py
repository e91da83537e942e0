"""Ranks that end with their test."""

from __future__ import annotations

import pytest
import transformers  # noqa: F401 - its lazy imports are not made for several threads at once

from support.backends.rank_threads import RankedBackend, Ranks


@pytest.fixture
def ranks():
    """``ranks(make, size)`` calls something on each of several ranks."""
    made = []

    def start(make, size, **layout):
        made.append(Ranks(make, size, **layout))
        return made[-1]

    yield start
    for one in made:
        one.close()


@pytest.fixture
def ranked():
    """``ranked(make, size)`` is a backend of several ranks."""
    made = []

    def start(make, size, **layout):
        made.append(RankedBackend(make, size, **layout))
        return made[-1]

    yield start
    for one in made:
        one.ranks.close()
