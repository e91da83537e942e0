"""Processes for ranks, and a look at what is left of groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.rank_processes import rank_processes


@pytest.fixture(scope="session")
def _processes():
    with rank_processes() as start:
        yield start


@pytest.fixture
def start_processes(_processes):
    """``start_processes(n)`` returns n rank processes, which end with the test."""
    started = []

    def start(number):
        made = _processes(number)
        started.extend(made)
        return made

    yield start
    for process in started:
        process.end()


@pytest.fixture(autouse=True)
def nothing_is_left_of_groups():
    """Of groups that this process made."""
    yield
    assert list(Path("/dev/shm").glob(f"trencadis-{os.getpid()}-*")) == []
