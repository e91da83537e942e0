"""Collectives in shared memory: the conformance suite on threads of one process, and what it does not see."""

from __future__ import annotations

from pathlib import Path

import pytest

from trencadis_plugins.executor.collectives.groups import create_group, open_group
from trencadis_testing import CollectiveConformance


@pytest.fixture(autouse=True)
def nothing_left():
    before = set(Path("/dev/shm").glob("trencadis-*"))
    yield
    assert set(Path("/dev/shm").glob("trencadis-*")) <= before


def make(size, *, timeout_s=60.0):
    owner = create_group("shared_memory", size=size, timeout_s=timeout_s)
    try:
        return [open_group(owner.address(rank)) for rank in range(size)]
    finally:
        owner.unlink()


class TestThreads(CollectiveConformance):
    make = staticmethod(make)
