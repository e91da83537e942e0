"""Ranks that end with their test."""

from __future__ import annotations

import functools

import pytest

from support.backends.gaudi_ranks import make_gaudi
from support.backends.rank_threads import RankedBackend, Ranks


@pytest.fixture
def ranked():
    """``ranked(size, **options)`` is a backend of several ranks."""
    made = []

    def start(size=2, *, expert=1, **options):
        made.append(RankedBackend(functools.partial(make_gaudi, **options), size, expert=expert))
        return made[-1]

    yield start
    for one in made:
        one.ranks.close()


@pytest.fixture
def ranks():
    """``ranks(make, size)`` calls something on each of several ranks."""
    made = []

    def start(make, size=2, **layout):
        made.append(Ranks(make, size, **layout))
        return made[-1]

    yield start
    for one in made:
        one.close()
