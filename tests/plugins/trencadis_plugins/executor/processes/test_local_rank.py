"""What a rank's process is told of its place on the machine, before it imports anything."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.eventually import eventually
from trencadis.records import ParallelLayout
from trencadis_plugins.executor.config import ProcessesConfig
from trencadis_plugins.executor.processes import ProcessesExecutor
from trencadis_testing.executor_fakes import make_backend


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(("replica", "expected"), [(0, [0, 1]), (2, [4, 5])])
def test_ranks_of_all_replicas_are_counted_on(replica, expected):
    executor = ProcessesExecutor(ProcessesConfig(), layout=ParallelLayout(tensor=2), replica=replica)
    ranks = list(executor._start_ranks(make_backend))
    files = [Path(f"/proc/{rank.pid}/environ") for rank in ranks]
    # Empty for a moment, while the process exchanges its program.
    eventually(lambda: all(file.read_bytes() for file in files))
    told = [file.read_bytes().split(b"\0") for file in files]
    for rank in ranks:
        rank.kill()
    assert [[one for one in own if one.startswith(b"TRENCADIS_LOCAL_RANK=")] for own in told] == [
        [f"TRENCADIS_LOCAL_RANK={number}".encode()] for number in expected
    ]
